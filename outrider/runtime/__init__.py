"""The process around a model: threads, files, ranks, reports."""
