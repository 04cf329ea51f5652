"""What the recipes of video and audio share: the training loop, the generators and the training of scorers."""
