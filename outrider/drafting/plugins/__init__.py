"""Proposers and the planner inside other engines, which score and verify the drafts themselves."""
