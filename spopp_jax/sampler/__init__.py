r"""The rollout service: the only package that speaks gRPC.

base        what an engine and a sampler must offer (the two seams)
rollout     engine x environments, without a network
engine      decodes many episodes together
in_process  the sampler in the caller's own thread
client      the sampler over a channel (connection)
local       the sampler as a child process (lifeline)
service     answers the calls; worker runs them, ledger accounts for them,
            session says for which runner
handshake, codec, weights, options, credentials, errors: what both sides share

`make proto` writes sampler_pb2* from sampler.proto:
python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. \
  --grpc_python_out=. spopp_jax/sampler/sampler.proto
"""
