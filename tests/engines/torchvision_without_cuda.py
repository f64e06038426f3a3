"""Lets torchvision's wheel for CUDA be imported beside a PyTorch without CUDA.

SGLang imports torchvision. The wheel's operators cannot be loaded without CUDA, and torchvision
fails where it describes them to PyTorch. Importing this module first declares their names.
"""

from __future__ import annotations

import torch

_NAMES = (
    "_deform_conv2d_backward", "_ps_roi_align_backward", "_ps_roi_pool_backward",
    "_roi_align_backward", "_roi_pool_backward", "deform_conv2d", "nms", "ps_roi_align",
    "ps_roi_pool", "qnms", "qroi_align", "roi_align", "roi_pool",
)  # fmt: skip

_library = torch.library.Library("torchvision", "FRAGMENT")
if not torch.cuda.is_available():
    for _name in _NAMES:
        _library.define(f"{_name}(Tensor x) -> Tensor")
