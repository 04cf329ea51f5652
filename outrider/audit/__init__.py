"""Users certify their own pair of target and proposer."""
