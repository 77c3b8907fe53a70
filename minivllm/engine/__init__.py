"""The engine room: requests, scheduler and KV cache manager, in pure Python, without torch.

Whatever a worker needs to know crosses the bridge in `messages.py`.
"""
