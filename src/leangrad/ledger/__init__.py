"""The ledger: for every tensor that autograd wants to keep, keep it, share it, or store a recipe.

Rooms, from the bottom up; each imports only those above it in this list:

values      what backward may ask for: kept tensors, recipes, views, shapes
origins     where tensors come from: rules of ops, the walk along the graph
observe     what nodes forget: calls, changes in place, random numbers; hooks and checkpoints
decision    keep, share or rebuild: for one saved tensor
learn       what a recorded step shows, and the trace that later steps follow; what to keep says ``leangrad.policy``
tune        towards a budget of memory, or a bound on the time
region      one forward: hooks, function mode and decision together; ``gc_pause`` while it runs
fuse        a chain of recipes as one kernel
ledger      what is learned from step to step; ``summary`` tells it

Glossary. Names are those of files and classes in this folder; docs/how_it_works.md has the same list.

Words
    saved tensor                    what autograd asks to keep from forward to backward
    kept                            held as it is until backward has read it
    rebuilt                         not held: made again in backward, bit for bit, when it is read
    anchor                          a kept tensor that recipes read
    recipe                          the ops that rebuild a tensor, from anchors and parameters
    origin                          how a tensor was made: the op, its inputs, its constants, its random state
    product                         the output of a matmul, a convolution or an attention: computed twice on demand only
    cut                             which tensors of a chain are kept, so that the others are rebuilt from them
    step                            one forward and its backward
    plan                            which tensors of a recorded step later steps keep, for the lowest peak

The ledger itself
    ledger, Ledger                  decides on every saved tensor: keep, share or rebuild; learns from step to step
    batches, Batches                the ledgers of one model that has a budget, by the shapes of a batch
    region, Region                  one forward while it runs: its hooks, its function mode, its decisions
    LedgerState                     protocol: what a region asks of its ledger
    decision, Decider               keep, share or rebuild one saved tensor; the Decider of a Region decides
    DecidingRegion                  protocol: what the Decider asks of its region
    Decision                        what the plan says of one saved tensor: op, bytes, whether it is simply kept
    SavedKind                       what became of one saved tensor of the recorded step
    StepListener                    protocol: what the decision tells the recorder of a step
    gc_pause, GcPause               Python's garbage collector does not run by itself while a region works
    summary                         the table of what was kept, rebuilt and shared, and why
    SummaryRow                      one line of that table: tensors that are alike

values: what backward may ask for
    values                          the folder of what a saved-tensor hook may return
    value, Value                    a tensor that backward may ask for: kept, rebuilt by its recipe, or absent
    Watch                           protocol: what times the ops of rebuilds
    Comparisons                     how often a fused kernel was compared with a replay op by op
    saved, PackedTensor             base class: what stands for a saved tensor and gives it back in backward
    Bare                            a kept tensor with the version that it must still have, and nothing else
    saved_view, SavedView           a saved view: strides over a base, which is kept or rebuilt once for all its views
    SavedPart                       a saved DTensor whose local part is kept or rebuilt
    cast, Cast                      a parameter in autocast's dtype, cast again whenever it is read
    shape_only, ShapeOnly           a saved tensor of which backward reads only sizes or strides, so it is not kept
    pending_save, PendingSave       what autograd holds for a tensor saved in a call, until the call has ended
    ShapeOnlyReader                 the node that reads a saved tensor for its shape alone
    rebuilt_cache, CachedValue      a rebuilt tensor, held for its next readers in this backward
    waypoints                       values that are rebuilt before a long recipe, so that no replay is deep
    ReplayedValue                   protocol: what is asked of the values on the way of a recipe
    node_metadata                   what the ledger writes into autograd's nodes: values, forgotten constants
    pending_inputs                  recipes that wait for a product which nobody has kept so far
    WaitingValue                    protocol: what is asked of a value whose recipe may wait
    inplace_variants                ops that may write their result over an input that only the replay holds

origins: where tensors come from
    origins                         the folder of rules and of the walk along autograd's graph
    graph_walk, Walk                walks from a saved tensor back to anchors and parameters: its recipe
    UnsavedInput                    an input of an op that its node does not save, because it needs no gradient
    WalkRegion                      protocol: what the walk asks of its region
    upstream_anchors                what is kept in place of a larger tensor: recent products, sums in fewer bits
    RecentProducts, ProductsRegion  the products of late; the protocol of what they ask of their region
    shards, Shards                  what recipes read of parameters that FSDP2 shards: a copy, or they themselves
    functions, FunctionRule         autograd Functions written in Python that have a recipe; FunctionRule is that of one
    NoRecipeError                   raised in a walk: this tensor cannot be rebuilt, and why
    rules                           the folder with the table of rules
    rule, Rule                      how one kind of autograd node is replayed: function, inputs, constants
    rule_builder, NodeRule          a rule fitted to one type of node: makes the value of a node's output
    pointwise                       rules of ops on each element, casts and copies
    reductions                      rules of reductions, scans, softmax, norms and transforms
    shapes                          rules of views, and of ops that only move elements
    windows                         rules of pooling, resampling, patches and dropout
    products                        rules of products, for ledgers that may run them again
    shorter                         replays with the same bits in less time than forward's op, on a CPU

observe: what nodes forget
    observe                         the folder of what has to be seen while forward runs
    function_mode, FunctionMode     the torch function mode of a region, which sees every call of a torch function
    ObservedRegion                  protocol: what the function mode asks of its region
    handlers                        for some torch functions: which constants to note while they run
    call_args                       the arguments of one call by name
    mutation                        changes in place that autograd does not record
    processes                       the folder of what torch.distributed does to tensors meanwhile
    collectives                     those that collectives of torch.distributed make
    random_ops, DropoutMask         random ops that are drawn again; DropoutMask is the random factor of one dropout
    unseen_writes                   whether the code of a model may write to memory past the versions of tensors
    rng, Draw                       the random state before an op, and the op run again from it; Draw is an attention's
    hooks, Hooks                    the saved-tensor hooks of a region, and where they are set
    active_region                   the region that is open in this thread
    gathers, Gathers                the modules whose parameters FSDP2 gathers, and the hooks by which it does
    Aside                           stands for such a hook while a region is open, which does not look at what it does
    checkpoint, Recomputation       regions inside torch.utils.checkpoint, around what backward runs again
    Placeholder                     a tensor without memory that a checkpoint stores in place of one that is rebuilt
    SegmentLedger, OuterLedger      protocols: the ledger of a checkpointed segment, and that of the region around it

learn: what a recorded step shows
    learn                           the folder of what later steps take from the recorded one
    recorder, Recorder              writes one step down: its saved tensors, what became of each, who read it
    items, Items                    the tensors that the policy decides on, and what each is rebuilt from
    reads, Reads                    what backward reads, in order: with the items, the graph for `leangrad.policy`
    Reader                          a node that reads a saved tensor in backward
    Segment                         protocol: what a plan asks of a checkpointed segment
    recorded_step, RecordedStep     the step as plain data, and what later steps do if they keep what the plan says
    SavedTensor                     what became of one saved tensor of that step
    entries, Entry                  one saved tensor, as the summary shows it
    Totals                          kept, rebuilt and shared bytes of a recorded step
    gradients                       which gradients are alive while each node of backward runs
    Graph, Node, Edge               the graph of backward nodes that gradients are counted on
    scratch, Convolution, Layout    memory that a convolution's backward takes for itself on a CPU: measured
    trace, Trace                    the calls of the recorded step that later steps follow
    Call                            one call of a trace
    TraceMode                       the function mode of a region that records a trace, follows one, or only takes notes
    TraceRecorder, RecordedCall     the trace while it is recorded; one call of it, with the tensors that it saved
    TracedRegion                    protocol: what TraceMode asks of its region
    early_end, EarlyEnd             where the override of a step is taken away before forward has ended
    Ends, Border                    what a recorded step tells of that; after which module it is
    Exit, Change                    parts of what it tells: a module has run; memory has changed in place
    EndingRegion                    protocol: what an early end asks of its region
    timing, Timing, Cost            what each op of a rebuild takes, on the host and on the device
    SavedMarks                      marks, in what counts memory, when tensors are saved and read
    Unpacks                         protocol: what stands for the unpack hook in one step
    Stopwatch                       moments on the clock of a device

tune: towards what the user asked for
    tune                            the folder of the way to a budget of memory, or to a bound on the time
    goal, Goal, Way                 what the user asked for; how one step on the way there runs
    history, History, Parts         the peaks of one step, be it below the allocator's own
    peaks, Peaks                    what steps took, and what the next one is foreseen to take
    Moment                          the beginning of a step: its time, and what was counted then
    meter, Meter                    the peak of a step on a CPU, where `leangrad.measure` runs it
    course, Course                  what both courses share: the plans of a recorded step, and steps that are timed
    to_budget, TowardsBudget        the fastest plan that stays within a budget
    Recordings                      what is known of the steps that were recorded for one budget
    to_slowdown, TowardsSlowdown    the least memory with which a step takes no longer than a bound
    pace, Pace                      which plan to try next for that
    tuner, Tuner                    the course of one ledger, through all that happens to its model
    host_limit, HostLimit           whether the GPU waits for the host, and what is kept if it does

fuse: a chain of ops as one kernel
    fuse                            the folder of fused replays; it registers itself where Triton has a device
    fused                           replays a chain as one Triton kernel, where one was proven to give the same bits
    chain, Chain                    the pointwise ops under a value, and what they read
    lowering, Norm                  how each op is written as steps of a kernel; Norm is a norm with its statistics
    builder, Builder                puts the steps of a chain together, and finds where each element is
    Operand                         an operand of a step: a tensor, a number, or the result of another step
    RefusedError                    raised by the builder: this chain cannot be one kernel, and why
    fused_plan, Plan                the kernel for chains of one kind: compiled, proven and run
    RemainingChecks                 how often a kernel is still compared with the replay op by op
    InexactError                    raised by a plan: an op has other bits here than ATen's
    CutError                        raised by a plan: the chain has to end at this value
    bit_exactness                   whether an op in a kernel has ATen's bits on this machine
    pattern, Pattern                what a chain looked like, to know the next one like it without gathering it
    UnlikeError                     raised for a chain whose constants cannot be compared
    matcher                         compares a chain with a pattern, and fetches the tensors that it reads
    PatternOp, Leaf                 parts of a pattern: one op, and one tensor that is read
"""

from leangrad.ledger.ledger import MIN_BYTES, Ledger
from leangrad.ledger.observe.active_region import no_regions
from leangrad.ledger.region import Region
from leangrad.ledger.tune.goal import Goal

__all__ = ["MIN_BYTES", "Goal", "Ledger", "Region", "no_regions"]
