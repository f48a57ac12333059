"""The program for spark-submit on a cluster: `spark-submit … submit.py run --config FILE`."""

from spark_consumers.command import app

if __name__ == "__main__":
    app()
