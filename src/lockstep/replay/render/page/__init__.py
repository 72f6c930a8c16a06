"""The page of a report: its template, its style and the script that draws its charts. Data only."""
