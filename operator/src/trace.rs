//! Spans of reconciles, a child for each of their steps, for who looks where an operator's time goes. Without a place to
//! send them to, nothing of this runs. They hold names, never what is in a resource.

use anyhow::Context as _;
use kube::ResourceExt as _;
use opentelemetry::trace::{SpanKind, Status, TraceContextExt as _, Tracer as _, TracerProvider as _};
use opentelemetry::{Context, KeyValue};
use opentelemetry_otlp::WithExportConfig as _;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{SdkTracer, SdkTracerProvider, Span};
use operator_api::LlmDeployment;

/// Sends spans. Clones send to the same place.
#[derive(Clone, Debug)]
pub struct Tracer {
    provider: SdkTracerProvider,
    tracer: SdkTracer,
}

/// The span of a reconcile, or nothing where none are sent.
#[derive(Debug)]
pub(crate) struct Trace(Option<(SdkTracer, Context)>);

/// The span of a step, which ends when it is dropped.
#[derive(Debug)]
pub(crate) struct Step(#[expect(dead_code, reason = "its drop ends it")] Option<Span>);

impl Tracer {
    /// Sends to `endpoint`, an address of OTLP over gRPC. To be called within a runtime.
    ///
    /// # Errors
    /// `endpoint` is no URL.
    pub fn new(endpoint: &str) -> anyhow::Result<Self> {
        let exporter = opentelemetry_otlp::SpanExporter::builder()
            .with_tonic()
            .with_endpoint(endpoint)
            .build()
            .with_context(|| format!("failed to send spans to {endpoint}"))?;
        let provider = SdkTracerProvider::builder()
            .with_batch_exporter(exporter)
            .with_resource(Resource::builder().with_service_name("ovfleet-operator").build())
            .build();
        let tracer = provider.tracer("ovfleet-operator");
        Ok(Self { provider, tracer })
    }

    /// Sends what is left. It blocks, and sends by way of the runtime in which this was made.
    pub fn flush(&self) {
        if let Err(error) = self.provider.shutdown() {
            tracing::warn!(%error, "failed to send the last spans");
        }
    }
}

impl Trace {
    /// Begins the span of looking at `object`.
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

    /// Begins the span of a step.
    pub(crate) fn step(&self, name: &'static str) -> Step {
        let begin = |(tracer, context): &(SdkTracer, Context)| {
            tracer.build_with_context(tracer.span_builder(name).with_kind(SpanKind::Internal), context)
        };
        Step(self.0.as_ref().map(begin))
    }

    /// Ends it with what came of it; `error` says what went wrong, if something did.
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
