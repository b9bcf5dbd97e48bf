"""The image and the chart take programs and minutes; `make deploy-long` tries them."""

from tests.support.long import is_long

collect_ignore = [] if is_long() else ["test_chart.py", "test_image.py"]
