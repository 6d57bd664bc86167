//! Exports spans to an OpenTelemetry collector.

use anyhow::Context as _;
use opentelemetry::trace::TracerProvider as _;
use opentelemetry_otlp::WithExportConfig as _;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{Sampler, SdkTracer, SdkTracerProvider};

/// Creates spans and exports them. Clones share the exporter.
#[derive(Clone, Debug)]
pub struct Tracer {
    provider: SdkTracerProvider,
    tracer: SdkTracer,
}

impl Tracer {
    /// Creates a tracer that sends the spans of `service` to `endpoint`, a URL of OTLP over gRPC. If a client has
    /// started the trace of an operation, the client's sampling decision applies. The fraction `sampling_ratio` of all
    /// other operations is traced. Must be called within a Tokio runtime.
    ///
    /// # Errors
    /// `endpoint` is not a URL, or its scheme is HTTPS, which the exporter does not support because it is built without
    /// TLS.
    pub fn new(service: &'static str, endpoint: &str, sampling_ratio: f32) -> anyhow::Result<Self> {
        let exporter = opentelemetry_otlp::SpanExporter::builder()
            .with_tonic()
            .with_endpoint(endpoint)
            .build()
            .with_context(|| format!("failed to create the span exporter for {endpoint:?}"))?;
        let sampler = Sampler::ParentBased(Box::new(Sampler::TraceIdRatioBased(f64::from(sampling_ratio))));
        let provider = SdkTracerProvider::builder()
            .with_batch_exporter(exporter)
            .with_sampler(sampler)
            .with_resource(Resource::builder().with_service_name(service).build())
            .build();
        let tracer = provider.tracer(service);
        Ok(Self { provider, tracer })
    }

    /// Returns the OpenTelemetry tracer, which creates spans.
    #[must_use]
    pub fn sdk(&self) -> &SdkTracer {
        &self.tracer
    }

    /// Exports the remaining spans and shuts down the exporter. Blocks the calling thread while the runtime in which
    /// the exporter was created sends the spans.
    pub fn flush(&self) {
        if let Err(error) = self.provider.shutdown() {
            tracing::warn!(%error, "failed to send the remaining spans");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The chart and the schema of LLMDeployment reject HTTPS URLs because of this error.
    #[tokio::test]
    async fn an_endpoint_with_tls_is_an_error() {
        assert!(Tracer::new("test", "http://collector:4317", 1.0).is_ok());
        let error = format!("{:#}", Tracer::new("test", "https://collector:4317", 1.0).unwrap_err());
        assert!(error.contains("HTTPS"), "{error}");
    }
}
