"""A torch device for tests: asynchronous, with memory of its own, on the host's cores.

`load()` builds it with torch's extension tools (once for each version of its source and of torch) and registers the
device type "lag". Kernels and copies run later than they are launched, on streams that are threads, with delays drawn
from a seed. The host cannot touch device memory, and freed memory is poisoned and reused early: code that forgets a
wait, an event, a `record_stream` or a pin gets wrong bits here, or a crash.
"""
