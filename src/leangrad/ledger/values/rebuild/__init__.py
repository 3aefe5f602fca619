"""What a `Value` uses while it is rebuilt.

``waypoints`` (values that are rebuilt before a long recipe runs), ``inplace_variants`` (ops that write their result
over an input that only the replay holds), ``rebuilt_cache`` (rebuilt tensors, cached for their next readers),
``replays`` (fused kernels, and timers of ops).
"""
