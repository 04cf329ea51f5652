"""The records of a round, sampling parameters, noise, trees and statistics."""
