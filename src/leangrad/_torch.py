"""Every private torch name that leangrad uses, each in one small function with a plain fallback.

Nothing outside this file may touch a name of torch that starts with an underscore and is not documented. A name that
a torch release drops makes leangrad plainer, never wrong: the fallback is always the answer that promises less.
"""
