"""What runs around a model: threads, files, processes of one model, reports."""
