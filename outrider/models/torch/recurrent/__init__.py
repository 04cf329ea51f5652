"""Recurrent layers of transformers, run over states that Outrider keeps."""
