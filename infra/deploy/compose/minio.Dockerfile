# MinIO's images are gone and its repository is archived: the last commit, from source.
FROM golang:1.26-bookworm AS build
RUN CGO_ENABLED=0 go install github.com/minio/minio@v0.0.0-20260212201848-7aac2a2c5b7c
FROM debian:bookworm-slim
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates curl && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10002 minio && install -d -o minio /data
COPY --from=build /go/bin/minio /usr/local/bin/minio
USER minio
VOLUME /data
ENTRYPOINT ["minio"]
CMD ["server", "--quiet", "--address", ":9000", "/data"]
