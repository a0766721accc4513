"""Engines in servers of other projects: vLLM and SGLang, over HTTP.

engine.ExternalEngine   slots, turns and publications; implements base.Engine
servers                 the seam: what the engine asks of any such server
vllm, sglang            one server each: its calls and how its answers read
semantics               measures what a server's log-probs speak of
calls                   one HTTP call, with a deadline, cancellable
"""
