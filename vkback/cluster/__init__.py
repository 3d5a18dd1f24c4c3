"""Work over many devices and many machines, on Dask distributed: a worker for each device, work pulled by one command that keeps what
has come back. The extra `vkback[hosts]` installs what it needs."""
