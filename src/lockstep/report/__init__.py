"""Reports: documents of figures as values, and their writers for terminals, Markdown and single-file pages."""
