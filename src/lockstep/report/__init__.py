"""Reports: documents as values, and their writers for terminals, Markdown and single-file HTML pages."""
