"""The settings every experiment has, with the values of a small machine.

Experiments import `get_config` and change what makes them that experiment.
This file is also the schema: an override must name one of these leaves and
keep its type. `config_dict.placeholder` marks a leaf that may stay None, which
means the value of the method's own published recipe. The comment above a leaf
is its description in `python experiments/train.py --help`.
"""

from ml_collections import config_dict


def get_config(arg: str = '') -> config_dict.ConfigDict:
  """Returns every setting; locked, so only these leaves can be set.

  Args:
    arg: text after a colon in `--config=FILE:arg`; must be empty here.

  Returns:
    A locked tree of int, float, bool, str and tuple leaves.

  Raises:
    ValueError: `arg` is not empty.
  """
  if arg:
    raise ValueError(f'this configuration takes no argument, got {arg!r}')
  config = config_dict.create(
    # Seed of every random stream of the run.
    seed=0,
  )
  config.run = config_dict.create(
    # Name of the run: its directory inside run.directory.
    name='unnamed',
    # Directory that holds the directories of runs.
    directory='runs',
    # Learner steps to train, one collected batch each.
    steps=105,
    # True continues the run of the same name from its last checkpoint.
    resume=False,
    # Learner steps between checkpoints; one is also written at the end.
    checkpoint_every_steps=20,
    # True shows a live progress line.
    progress=True,
    # True only says what the learner would need: memory, operations, shardings.
    dry_run=False,
  )
  config.environment = config_dict.create(
    # Which environment: the name of a suite in spopp_jax/envs.
    name='household',
    # Directory or file of official games; '' generates own scenes.
    path='',
    # Size of generated scenes: small, medium or large.
    size='small',
    # Which kinds of task are generated.
    task_types=('put',),
    # Tasks in the fixed training set.
    num_tasks=128,
    # Seed of the generated scenes.
    seed=0,
    # Environment interactions an episode at most.
    step_limit=10,
  )
  config.model = config_dict.create(
    # Published model whose sizes cold_start.policy must have, such as
    # Qwen3.5-0.8B; '' is any, or the sizes below for a policy of its own.
    preset='',
    # Width of the residual stream.
    hidden_size=64,
    # Decoder blocks.
    num_layers=2,
    # Query heads.
    num_heads=4,
    # Key and value heads; divides num_heads.
    num_key_value_heads=4,
    # Width of one head; even.
    head_dim=16,
    # Width of the feed-forward layer.
    intermediate_size=192,
    # How turns are written: words (of games) for the policies trained here;
    # for pretrained tokenizers plain, qwen3, qwen3_nothink, qwen3_5,
    # qwen3_5_nothink, smollm2 or llama3.
    chat_format='words',
    # Words of the system turn of a chat; '' takes the chat format's own.
    system_prompt='',
  )
  config.cold_start = config_dict.create(
    # Directory of a saved policy to start from; '' trains one on walkthroughs.
    policy='',
    # Supervised optimizer steps.
    steps=300,
    # Turns that a demonstration takes at most; more than the step limit shows
    # the policy how to go on, not how to be quick.
    max_turns=14,
    # Demonstrations a supervised step.
    batch_size=32,
    # Peak learning rate of supervised training.
    learning_rate=3e-3,
    # Chance in [0, 1) of a useless action before each useful one.
    dither=0.95,
    # Scenes whose walkthroughs are demonstrated; apart from the tasks.
    num_games=2000,
  )
  config.offline = config_dict.create(
    # offline.json of an earlier run of the same start; '' measures anew.
    path='',
    # Rollouts a task under the starting policy; they give the first values.
    rollouts_per_task=8,
  )
  config.evaluation = config_dict.create(
    # Rollouts a task in the unbiased success after training.
    rollouts_per_task=4,
  )
  config.sampler = config_dict.create(
    # Sampler services: host:port or unix:path of running ones; each 'local'
    # starts one on this machine. runs/NAME/samplers.txt changes them later.
    addresses=('local',),
    # How snapshots get to a service: directory (runs/NAME/weights, which both
    # see), grpc (sent in chunks), or auto: sent only where that is not seen.
    transport='auto',
    # Episodes decoded side by side.
    slots=96,
    # Tokens of an episode at most, prompt and observations included.
    context_length=192,
    # Sampled tokens a turn at most, the end token included.
    max_turn_tokens=8,
    # Logits are divided by it; > 0.
    temperature=1.0,
    # Mass of the likeliest tokens that may be drawn, after top_k; 1 is all.
    top_p=1.0,
    # Number of the likeliest tokens that may be drawn; 0 is all.
    top_k=0,
    # Tokens must be this many times as likely as the likeliest; 0 is off.
    min_p=0.0,
    # Wait for the service to accept a connection at most, in s.
    connect_timeout_s=120.0,
    # Wait for a rollout that one service was asked for at most, in s.
    rollout_timeout_s=60.0,
    # Time without any service at most, in s.
    recovery_timeout_s=60.0,
    # PEM file of the CA that signed the services' certificates; '': no TLS.
    tls_ca='',
    # PEM file of this run's own certificate, which the services ask for.
    tls_certificate='',
    # PEM file of its private key, not encrypted.
    tls_key='',
    # File with the token that the services ask for, in one line; '' is none.
    token_file='',
    # True takes services on other machines without TLS: anyone may interfere.
    allow_insecure=False,
  )
  config.dispatch = config_dict.create(
    # Trajectories a learner step.
    batch_size=96,
    # Rollouts in flight at once; more than batch_size over-dispatches. What
    # staleness scheduled dispatches follows from the batches alone.
    in_flight=96,
    # Groups of one prompt in flight at once; the published recipe has 1.
    per_prompt=1,
    # Tries of a rollout, failed episodes and lost services counted together.
    attempts=5,
    # Episodes cut by a token limit count: as failures, True, or not at all.
    keep_truncated=True,
    # What becomes of old work when a version is published: drain, bounded,
    # interruptible or scheduled.
    staleness='drain',
    # Versions that a trained rollout may be old: 0 is synchronous; drain allows
    # 1 at most; scheduled draws every rollout's lag from 1 to it.
    max_lag=1,
    # True drops rollouts older than max_lag; False makes the learner wait.
    discard_overdue=False,
    # True trains in the order of dispatch, not in that of finishing.
    in_order=False,
    # When an outcome becomes evidence: received (on return) or consumed.
    evidence_from='received',
  )
  config.objective = config_dict.create(
    # Method: the name of a file in spopp_jax/objectives.
    name='spopp',
    # Rollouts a prompt and dispatch; 1 for event_time and receipt_order.
    group_size=config_dict.placeholder(int),
    # Baseline: event_time, receipt_order, group_mean or leave_one_out.
    baseline=config_dict.placeholder(str),
    # Standardization: action_token, trajectory, group or none.
    measure=config_dict.placeholder(str),
    # False leaves the mean in a batch-wide standardization.
    center=config_dict.placeholder(bool),
    # False leaves the deviation out of a batch-wide standardization.
    scale=config_dict.placeholder(bool),
    # Groups of equal rewards leave the loss and its denominator.
    drop_equal_groups=config_dict.placeholder(bool),
    # Tokens from which a response is overlong (DAPO); 0 is off.
    overlong_limit=config_dict.placeholder(float),
    # Tokens before that in which the penalty grows.
    overlong_buffer=config_dict.placeholder(float),
    # Learner-to-sampler weight: none, token, sequence, icepop or tempered.
    correction=config_dict.placeholder(str),
    # Upper truncation of the weight of token and sequence; >= 1.
    rollout_cap=config_dict.placeholder(float),
    # Smallest ratio that icepop, window and geometric_mean keep.
    window_low=config_dict.placeholder(float),
    # Largest ratio that icepop, window and geometric_mean keep.
    window_high=config_dict.placeholder(float),
    # Share of the sample size that tempering keeps effective; (0, 1].
    target_ess_fraction=config_dict.placeholder(float),
    # Halvings of the bisection for the tempering exponent.
    tempering_iterations=config_dict.placeholder(int),
    # What is tempered together: group or batch.
    tempering_scope=config_dict.placeholder(str),
    # Log-ratio of a sequence that is tempered: sum or mean over tokens.
    tempering_log_ratio=config_dict.placeholder(str),
    # Tempered weights of a group have mean_one or sum_one.
    tempering_scale=config_dict.placeholder(str),
    # Rejected tokens: none, window, geometric_mean or second_moment (M2PO).
    token_mask=config_dict.placeholder(str),
    # Mean squared log-ratio that second_moment allows, in nats^2.
    second_moment_threshold=config_dict.placeholder(float),
    # Whose rule second_moment follows: paper, official_cap or areal.
    second_moment_variant=config_dict.placeholder(str),
    # Tokens the loss divides by: all, or those that were kept.
    denominator=config_dict.placeholder(str),
    # Surrogate: clip, clip_weight, unclipped or likelihood.
    surrogate=config_dict.placeholder(str),
    # Ratio that carries the gradient: token, sequence_mean or sequence_sum.
    ratio=config_dict.placeholder(str),
    # Its denominator: proximal, behaviour or group_expectation.
    ratio_to=config_dict.placeholder(str),
    # The ratio is clipped below at 1 - clip_low.
    clip_low=config_dict.placeholder(float),
    # The ratio is clipped above at 1 + clip_high.
    clip_high=config_dict.placeholder(float),
    # Which ratio must stay in that range: the ratio, or the one to behaviour.
    clip_region=config_dict.placeholder(str),
    # Cap c > 1 on the ratio where the advantage is negative; 0 is off.
    dual_clip=config_dict.placeholder(float),
    # Token losses to one: token_mean, token_sum, seq_mean_token_mean,
    # seq_mean_token_sum or seq_mean_token_sum_norm.
    aggregation=config_dict.placeholder(str),
    # Constant in tokens that seq_mean_token_sum_norm divides by.
    aggregation_norm=config_dict.placeholder(float),
  )
  config.evidence = config_dict.create(
    # Weight that event_time evidence keeps a policy event.
    retention=config_dict.placeholder(float),
    # Lowest weight that receipt_order evidence keeps a visit.
    retention_min=config_dict.placeholder(float),
    # Highest weight that receipt_order evidence keeps a visit.
    retention_max=config_dict.placeholder(float),
    # Drift in nats at which receipt_order evidence keeps one half.
    drift_half_life=config_dict.placeholder(float),
    # Drift on a stored response in receipt_order: abs_logratio, k1 or k3.
    drift_estimator=config_dict.placeholder(str),
    # Tokens the drift is averaged over in receipt_order: action or response.
    drift_mask=config_dict.placeholder(str),
    # Tokens of stored responses in receipt_order at most; beyond it those of
    # the prompts unvisited longest are forgotten.
    max_stored_tokens=config_dict.placeholder(int),
  )
  config.optimizer = config_dict.create(
    # Peak learning rate of AdamW.
    learning_rate=5e-4,
    # Decay of the second moment; [0, 1).
    b2=0.99,
    # Decoupled weight decay; >= 0.
    weight_decay=0.0,
    # Global gradient norm is clipped to it; > 0.
    max_grad_norm=1.0,
    # Optimizer steps over which the learning rate rises to its peak; >= 0.
    warmup_steps=5,
  )
  config.learner = config_dict.create(
    # Optimizer steps a collected batch, each on its own part of it.
    minibatches=2,
    # Parts that each minibatch's gradient is computed in, to save memory.
    microbatches=1,
    # Tokens whose logits are held at a time; memory grows with it.
    chunk_tokens=1024,
    # Numbers of products and activations: float32, or bfloat16 with float32
    # parameters, norms, softmax, log-probs and gradients.
    compute_dtype='float32',
    # Activations that the backward pass computes anew, to save memory: none;
    # full, all inside a block; dots, all but products with parameters.
    remat='none',
    # True trains on truncated decoding without kept ids, by a proxy ratio.
    allow_proxy_ratio=False,
    # True ends the run when sampler and learner suddenly differ; False warns.
    stop_on_gap=False,
    # Tokens of a packed row.
    row_length=192,
    # Row counts a minibatch is padded to, rising; one compilation each.
    row_buckets=(20, 24, 28),
  )
  config.lora = config_dict.create(
    # Rank of adapters, which are trained alone; 0 trains all parameters.
    rank=0,
    # Their product is scaled by alpha / rank.
    alpha=32.0,
    # Layers that get adapters, by the last word of their names.
    targets=(
      *('q_proj', 'k_proj', 'v_proj', 'o_proj'),
      *('gate_proj', 'up_proj', 'down_proj'),
    ),
  )
  config.mesh = config_dict.create(
    # Devices of all hosts that share the rows, each with all parameters; 0 is
    # what the other two axes leave (one of the three may be 0).
    data=0,
    # Devices that share the rows and also parameters and optimizer state.
    fsdp=1,
    # Devices that share every product and its parameters; rows stay whole.
    tensor=1,
    # Memory of a device, in GiB; 0 asks it.
    memory_gib=0.0,
  )
  config.hosts = config_dict.create(
    # Hosts that share the learner; each is started with the same settings.
    count=1,
    # Which of them this is: 0 leads and holds the run, up to count - 1.
    index=0,
    # Address of host 0 where the others find it, host:port.
    coordinator='127.0.0.1:8476',
    # Wait for all of them to come, in s.
    start_timeout_s=300.0,
  )
  return config.lock()
