"""OpenAI's route for transcripts, if the target is a speech model."""
