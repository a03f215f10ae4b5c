"""How figures come about: models, texts and kernels, the two arms, and records of what they did."""
