"""A model of image tokens: a codebook of patches, a target, a draft, and a measurement of relaxed rules."""
