"""Read a source as the tests of connectors look at it."""


def read(source, partition, position=None):
    """Users, and the position behind them."""
    users, done = [], False
    while not done:
        batch = source.read(partition, position, columns=["user"])
        users += batch.table["user"].to_pylist()
        position, done = batch.position, batch.done
    return users, position
