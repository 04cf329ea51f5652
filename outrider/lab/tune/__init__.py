"""`outrider tune`: measures proposers on a workload and recommends whether and how to speculate."""
