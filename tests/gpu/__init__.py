"""What only a GPU can show. Run by `scripts/gpu-check`, or `scripts/test -m gpu tests/gpu`.

With AIRLIFT_GPU_TESTS_ON_CPU=1 the tests run on the CPU where they make sense there.
"""
