"""Records of what the commands found, and of what it depends on. The modules here import no other room."""
