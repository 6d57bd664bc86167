//! OpenTelemetry spans of reconciles, with a child span for each step. Spans are created only if an endpoint is
//! configured. They contain names of resources, never the content of a resource.

use anyhow::Context as _;
use kube::ResourceExt as _;
use opentelemetry::trace::{SpanKind, Status, TraceContextExt as _, Tracer as _, TracerProvider as _};
use opentelemetry::{Context, KeyValue};
use opentelemetry_otlp::WithExportConfig as _;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{SdkTracer, SdkTracerProvider, Span};
use operator_api::LlmDeployment;

/// Exports spans. Clones share the exporter.
#[derive(Clone, Debug)]
pub struct Tracer {
    provider: SdkTracerProvider,
    tracer: SdkTracer,
}

/// The span of a reconcile; `None` if spans are not exported.
#[derive(Debug)]
pub(crate) struct ReconcileSpan(Option<(SdkTracer, Context)>);

/// The span of a step, which ends when the value is dropped.
#[derive(Debug)]
pub(crate) struct StepSpan(#[expect(dead_code, reason = "the span ends when it is dropped")] Option<Span>);

impl Tracer {
    /// Creates an exporter that sends spans to `endpoint`, a URL of OTLP over gRPC. It must be called within a Tokio
    /// runtime.
    ///
    /// # Errors
    /// `endpoint` is not a URL.
    pub fn new(endpoint: &str) -> anyhow::Result<Self> {
        let exporter = opentelemetry_otlp::SpanExporter::builder()
            .with_tonic()
            .with_endpoint(endpoint)
            .build()
            .with_context(|| format!("failed to create an exporter of spans to {endpoint:?}"))?;
        let provider = SdkTracerProvider::builder()
            .with_batch_exporter(exporter)
            .with_resource(Resource::builder().with_service_name("ovfleet-operator").build())
            .build();
        let tracer = provider.tracer("ovfleet-operator");
        Ok(Self { provider, tracer })
    }

    /// Sends the remaining spans. It blocks the thread, and sends through the runtime in which the exporter was created.
    pub fn flush(&self) {
        if let Err(error) = self.provider.shutdown() {
            tracing::warn!(%error, "failed to send the remaining spans");
        }
    }
}

impl ReconcileSpan {
    /// Starts the span of a reconcile of `object`.
    pub(crate) fn start(tracer: Option<&Tracer>, object: &LlmDeployment) -> Self {
        Self(tracer.map(|Tracer { tracer, .. }| {
            let builder = tracer.span_builder("reconcile").with_kind(SpanKind::Internal).with_attributes([
                KeyValue::new("k8s.namespace.name", object.namespace().unwrap_or_default()),
                KeyValue::new("ovfleet.llmdeployment.name", object.name_any()),
                KeyValue::new("ovfleet.llmdeployment.generation", object.metadata.generation.unwrap_or(0)),
            ]);
            let context = Context::new();
            let span = tracer.build_with_context(builder, &context);
            (tracer.clone(), context.with_span(span))
        }))
    }

    /// Starts the span of a step.
    pub(crate) fn step(&self, name: &'static str) -> StepSpan {
        let start = |(tracer, context): &(SdkTracer, Context)| {
            tracer.build_with_context(tracer.span_builder(name).with_kind(SpanKind::Internal), context)
        };
        StepSpan(self.0.as_ref().map(start))
    }

    /// Ends the span with the outcome of the reconcile, and with its error if it failed.
    pub(crate) fn end(self, outcome: &'static str, error: Option<String>) {
        let Some((_, context)) = self.0 else { return };
        let span = context.span();
        span.set_attribute(KeyValue::new("ovfleet.outcome", outcome));
        if let Some(error) = error {
            span.set_status(Status::error(error));
        }
        span.end();
    }
}
