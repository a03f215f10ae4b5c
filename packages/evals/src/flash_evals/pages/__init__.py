"""Shows results as text, as Markdown and as the HTML page of `flash-eval report`, from their records alone."""
