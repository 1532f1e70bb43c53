"""What the timelines of a job's ranks say together: one trace on one clock, and a page to read."""
