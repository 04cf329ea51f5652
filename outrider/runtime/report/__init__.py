"""Console tables, JSON documents and HTML pages."""
