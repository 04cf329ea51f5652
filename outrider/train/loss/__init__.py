"""The unrolled steps of a draft, and the losses of training."""
