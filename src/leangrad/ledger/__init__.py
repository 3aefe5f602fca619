"""The eager engine: for every tensor that autograd saves, keep it, share it, or store a recipe that rebuilds it.

Folders and files from the bottom up. Each imports only those above it in this list.

values      what a saved-tensor hook may return: kept tensors, recipes, views, shapes
origins     where a tensor comes from: rules for each op, and the walk along the autograd graph
observe     what autograd nodes do not record: call arguments, in-place changes, random state; hooks and checkpoints
decision    keep, share or rebuild one saved tensor
learn       the recorded step and the trace that later steps follow; `leangrad.policy` chooses what to keep
tune        the search for a plan that meets a memory budget or a slowdown bound
region      one forward pass: its hooks, its function mode and its decisions; ``gc_pause`` while it runs
fuse        a chain of recipes replayed as one Triton kernel
ledger      the state that lasts from step to step; ``summary`` prints it

Glossary. Names are those of files and classes in this folder; docs/how_it_works.md has the same list.

Words
    saved tensor                    a tensor that autograd asks to keep from forward to backward
    kept                            held unchanged until backward has read it
    rebuilt                         not held: recomputed in backward, bit for bit, when it is read
    anchor                          a kept tensor that recipes read
    recipe                          the ops that rebuild a tensor from anchors and parameters
    origin                          how a tensor was made: the op, its inputs, its constants, its random state
    product                         the output of a matmul, convolution or attention; recomputed only under a budget
    cut                             the choice of kept tensors in a chain, from which the others are rebuilt
    step                            one forward pass and its backward pass
    plan                            the set of tensors of the recorded step that later steps keep

The ledger itself
    ledger, Ledger                  decides about every saved tensor of a model and learns from step to step
    batches, Batches                the ledgers of one model with a budget, one for each set of batch shapes
    region, Region                  one forward pass while it runs: its hooks, its function mode, its decisions
    LedgerState                     protocol: what a Region needs from its Ledger
    decision, Decider               decides whether one saved tensor is kept, shared or rebuilt
    DecidingRegion                  protocol: what the Decider needs from its Region
    Decision                        what the plan says about one saved tensor: op, bytes, whether to keep it
    SavedKind                       what becomes of one saved tensor under the plan
    StepListener                    protocol: what the Decider reports to the Recorder
    deferred, DeferredDecisions     decisions postponed until the call that saved the tensors has returned
    gc_pause, GcPause               pauses Python's automatic garbage collection while a region is open
    summary                         the printed table of what was kept, rebuilt and shared, and why
    SummaryRow                      one line of that table: a group of similar tensors

values: what backward may ask for
    values                          the folder of objects that a saved-tensor hook may return
    value, Value                    a tensor that backward may ask for: kept, rebuilt by its recipe, or absent
    Changes                         counts how often backward found that a tensor it needs was changed in place
    saved, PackedTensor             base class of what a pack hook returns; unpack gives the tensor back
    Bare                            a kept tensor with its expected version, and no Value around it
    saved_view, SavedView           a saved view: a stride over a base that is kept or rebuilt once for all views
    SavedPart                       a saved DTensor whose local part is kept or rebuilt
    cast, Cast                      a parameter in autocast's dtype, cast again whenever it is read
    shape_only, ShapeOnly           stands for a saved tensor of which backward reads only sizes or strides
    pending_save, PendingSave       what autograd holds for a saved tensor until the call that saved it returns
    ShapeOnlyReader                 a node that reads a saved tensor only for its shape
    rebuild                         the folder of what a Value uses while it is being rebuilt
    replays                         hooks into a replay: fused kernels that take several ops, and timers of ops
    OpTimer                         protocol: times each op of a rebuild
    Comparisons                     counts how often a fused kernel was compared with the replay op by op
    rebuilt_cache, CachedValue      a rebuilt tensor, held for its remaining readers in this backward pass
    waypoints                       values rebuilt ahead of a long recipe, which bounds the recursion depth
    ReplayedValue                   protocol: what waypoints need from the values of a recipe
    node_metadata                   what the ledger stores in autograd nodes: values and forgotten constants
    pending_inputs                  recipes that wait for a product which nothing has kept yet
    WaitingValue                    protocol: what pending_inputs needs from a value whose recipe waits
    inplace_variants                ops that may write their result over an input that only the replay holds

origins: where tensors come from
    origins                         the folder of op rules and of the walk along the autograd graph
    graph_walk, Walk                builds a recipe by walking from a saved tensor to anchors and parameters
    Noted                           the unsaved inputs that this thread's region has recorded
    UnsavedInput                    an input that a node does not save because it needs no gradient
    WalkRegion                      protocol: what the Walk needs from its Region
    upstream_anchors                smaller tensors kept in place of a saved one: recent products, narrower dtypes
    NarrowRegion                    protocol: what keeping a tensor in fewer bits needs of the Region
    RecentProducts, ProductsRegion  the latest products, held for a while; the protocol they need from the Region
    shards, Shards                  how recipes read FSDP2-sharded parameters: in place, or from a copy
    functions, FunctionRule         rules for autograd Functions written in Python
    RuleWalk                        protocol: what a FunctionRule needs from the Walk
    NoRecipeError                   raised in a walk when a tensor cannot be rebuilt; says why
    rules                           the folder with the table of rules
    rule, Rule                      how one type of autograd node is replayed: function, inputs, constants
    rule_builder, NodeRule          compiles a Rule into a function that makes the Value of a node's output
    pointwise                       rules for elementwise ops, casts and copies
    reductions                      rules for reductions, scans, softmax, norms and transforms
    shapes                          rules for views and for ops that only move elements
    windows                         rules for pooling, resampling, patches and dropout
    products                        rules for products, used only when the ledger may run them again
    shorter                         CPU replays with the same bits as forward's op in less time

observe: what nodes forget
    observe                         the folder of what has to be recorded while forward runs
    function_mode, FunctionMode     the torch function mode of a region, which sees every torch function call
    ObservedRegion                  protocol: what the FunctionMode needs from its Region
    handlers                        for some torch functions: the constants to record when they are called
    call_args                       the arguments of one call, by name
    mutation                        in-place changes that autograd does not record
    processes                       the folder of what torch.distributed does to tensors during forward
    collectives                     in-place changes made by collectives of torch.distributed
    random_ops, DropoutMask         random ops that can be redrawn; DropoutMask is the random factor of one dropout
    unseen_writes                   static check whether a model's code may write past a tensor's version counter
    Uses                            the names that one piece of the model's code uses
    proof                           the folder of the static proof that autograd records all changes of a forward
    facts, Facts                    what a proof relies on, compared in each step
    search, Search                  what calls of functions, methods and modules may do
    lookups, Lookups                attributes, elements and truth of the objects that a forward names
    python_calls                    what Python's own functions return: isinstance, zip, getattr
    frame, Frame                    the statements of one function, in all of its branches
    expressions, Expressions        the expressions of one function, and what they stand for
    Searcher                        protocol: what the expressions need from the search
    allowed                         the functions, methods and layers that a proof admits
    source                          the syntax tree of a function, checked against its code
    static_values, Data, Known      what is known about a value: tensors and numbers, or one of some objects
    Row, Group, List, ListMethod    a tuple; things to iterate over; a list that the code makes, and its methods
    Method, OfTensor, Parent        a method of a module, of a tensor, and `super()`
    NoKeywords                      the `**keywords` of a function that was called without any
    Unproven                        raised where the code does something that the proof does not know
    rng, Draw                       saved generator states; a Draw replays an attention's dropout from one
    hooks, Hooks                    the saved-tensor hooks of a region, and when they are set
    active_region                   the region that is open in this thread
    gathers, Gathers                finds modules whose parameters FSDP2 gathers, and wraps their FSDP2 hooks
    SuspendedHook                   wraps an FSDP2 hook so that the open region ignores what it does
    checkpoint, Recomputation       opens a region inside torch.utils.checkpoint when backward recomputes a segment
    Placeholder                     a tensor without memory that a checkpoint stores for one that is rebuilt
    SegmentLedger, OuterLedger      protocols: the ledger of a checkpointed segment, and the one around it

learn: what a recorded step shows
    learn                           the folder of what later steps take from the recorded one
    recorder, Recorder              records one step: its saved tensors, what happened to each, who read it
    items, Items                    the tensors that the policy decides about, and what each is rebuilt from
    reads, Reads                    what backward reads, in order; with the items, the graph for `leangrad.policy`
    Reader                          a node that reads a saved tensor in backward
    Segment                         protocol: what a plan needs from a checkpointed segment
    Learned                         what later steps use: the plan, a decision for each saved tensor, the trace
    recorded_step, RecordedStep     the recorded step as plain data; derives decisions and trace from a plan
    SavedTensor                     what happened to one saved tensor of that step
    entries, Entry                  one saved tensor as the summary shows it
    Totals                          kept, rebuilt and shared bytes of a recorded step
    gradients                       which gradients are alive while each node of backward runs
    Graph, Node, Edge               the graph of backward nodes on which gradients are counted
    scratch, Convolution, Layout    measured workspace of a convolution's backward on a CPU
    trace, Trace                    the torch function calls of the recorded step that later steps follow
    Call                            one call of a trace
    TraceMode                       the FunctionMode that records a trace, follows one, or runs without either
    TraceRecorder, RecordedCall     records a trace; one recorded call with the tensors that it saved
    TracedRegion                    protocol: what TraceMode needs from its Region
    early_end, EarlyEnd             the forward hook after which the function mode of a step is removed
    Ends, Border                    computes where that may happen; the module after which it does
    EarlyEnds                       whether the steps of one ledger may end their function mode early
    ForwardCode                     the modules, hooks and functions of a model's forward, to detect changes
    InertHook                       what a copied model has in place of a temporary hook of ours
    Exit, Change                    recorded events: a module has returned; memory was changed in place
    unwatched, Needs                which calls of the recorded step needed the function mode
    Handover, Span                  the stretch of later steps without it, and where hooks are set in there
    timing, Timing, Cost            measures what each op of a rebuild takes, on the host and on the device
    SavedMarks                      marks the times at which tensors are saved and read in a memory history
    UnpackHook                      protocol: what replaces the unpack hook for one step
    Stopwatch                       reads the clock of a device

tune: towards what the user asked for
    tune                            the folder of the search for a plan that meets a budget or a slowdown
    goal, Goal, StepMode            what the user asked for; how the next step is to run
    history, History, Parts         the peak of one step, even one below the allocator's previous peak
    peaks, Peaks                    measured peaks of steps, and the predicted peak of the next one
    Moment                          the readings at the beginning of a step: time and memory counters
    meter, Meter                    the peak of a step on a CPU, when `leangrad.measure` runs it
    plan_search, PlanSearch         base class of both searches: plans of a recorded step, and timed steps
    budget_search, BudgetSearch     finds the fastest plan that stays within a memory budget
    Recordings                      what is known from the steps recorded for one budget
    slowdown_search, SlowdownSearch  finds the lowest peak that stays within a bound on the time
    candidate_plans, CandidatePlans  chooses the next plan that SlowdownSearch tries
    ratios, Ratios                  the time of a plan over plain PyTorch's, and how certain it is
    tuner, Tuner                    runs the search of one ledger, and restarts it when the model changes
    host_limit, HostLimit           measures whether the GPU waits for the host, and what to keep if it does

fuse: a chain of ops as one kernel
    fuse                            the folder of fused replays; it registers itself where Triton has a device
    fused                           replays a chain as one Triton kernel that was proven to give the same bits
    chain, Chain                    the pointwise ops below a value, and the tensors that they read
    lowering, Norm                  how each op becomes steps of a kernel; Norm is a norm with its statistics
    builder, Builder                assembles the steps of a chain and computes where each element lies
    Operand                         an operand of a step: a tensor, a number, or the result of another step
    RefusedError                    raised by the Builder when a chain cannot be one kernel; says why
    fused_plan, Plan                the kernel for one kind of chain: compiled, proven and run
    RemainingChecks                 how often a kernel must still be compared with the replay op by op
    InexactError                    raised by a Plan when an op has other bits than ATen's on this machine
    CutError                        raised by a Plan when the chain has to end at this value
    bit_exactness                   whether an op in a kernel has ATen's bits on this machine
    pattern, Pattern                the structure of a chain, which recognizes the same chain in later steps
    UnlikeError                     raised for a chain whose constants cannot be compared
    matcher                         compares the ops of a chain with those of a Pattern
    PatternOp, Leaf                 parts of a Pattern: one op, and one tensor that is read
"""

from leangrad.ledger.ledger import MIN_BYTES, Ledger
from leangrad.ledger.observe.active_region import no_regions
from leangrad.ledger.region import Region
from leangrad.ledger.tune.goal import Goal

__all__ = ["MIN_BYTES", "Goal", "Ledger", "Region", "no_regions"]
