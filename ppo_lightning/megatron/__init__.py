"""Megatron-Core under Lightning: the only home of `import megatron`."""

import warnings

# said at import of megatron.core by every process; the fallbacks are what this package is built and tested on
warnings.filterwarnings("ignore", message=r".*(Apex|Transformer Engine).*not installed.*")
warnings.filterwarnings("ignore", message=r".*scope is deprecated.*cuda_graph_scope.*")
