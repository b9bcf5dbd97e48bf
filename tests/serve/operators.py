"""The operator's side of a pipeline, without its process."""

from dpstream.serve.event_stream import Hub
from dpstream.serve.middleware import Token
from dpstream.serve.operator_side import OperatorSide
from dpstream.serve.release_store import ReleaseReader
from dpstream.serve.supervisor import Supervisor
from dpstream.serve.worker import store_folder

TOKEN = "a token for tests alone"
HEADERS = {"authorization": f"Bearer {TOKEN}"}

PUSHED = '''
[source]
path = "http:"
[budget]
dataset = "clicks"
epsilon = 4
delta = 1e-6
[state]
path = "state/"
[[query]]
name = "pages"
sql = """
SELECT WITH DIFFERENTIAL_PRIVACY
       OPTIONS (epsilon = 4, delta = 1e-7, privacy_unit_column = user, max_groups_contributed = 2,
                max_rows_per_group = 1,
                privacy_unit_period = INTERVAL '1' DAY, time_unit = 's',
                allowed_lateness = INTERVAL '3' MINUTE)
       page, window_start, COUNT(*) AS clicks
FROM TUMBLE(clicks, DESCRIPTOR(at), INTERVAL '1' MINUTE)
GROUP BY page, window_start
EMIT EVERY INTERVAL '1' SECOND
"""
'''


def operator_side(pipeline, **settings):
    hub = Hub(ReleaseReader(store_folder(pipeline)), grid=0.05)
    supervisor = Supervisor(path=pipeline.path)
    token = Token(TOKEN, source="a test")
    return OperatorSide(pipeline=pipeline, token=token, supervisor=supervisor, hub=hub, **settings)
