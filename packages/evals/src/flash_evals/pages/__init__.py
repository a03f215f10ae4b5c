"""How results are shown: text, Markdown and the HTML page of `flash-eval report`, out of records alone."""
