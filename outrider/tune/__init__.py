"""The advisor: measures a workload, and says whether and how to speculate."""
