"One thread for each test process: with two on two cores, more threads make small operations many times slower."
import os

os.environ.setdefault('OMP_NUM_THREADS', '1')
os.environ.setdefault('MPLBACKEND', 'Agg')

import pytest
import torch


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if 'gpu' in item.keywords: item.add_marker(pytest.mark.skip(reason='no CUDA device'))
