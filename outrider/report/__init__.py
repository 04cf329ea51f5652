"""Tables, JSON and HTML pages for people."""
