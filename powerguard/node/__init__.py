"""The node daemon: reads UPSes, decides by the core, acts."""
