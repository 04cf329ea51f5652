"""Models by name from the Hugging Face Hub: their names, their files, and the download."""
