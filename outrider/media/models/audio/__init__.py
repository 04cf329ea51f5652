"""The audio models: spectra, synthesizer, scorer and captions."""
