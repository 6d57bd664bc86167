//! OpenTelemetry spans of reconciles, with a child span for each step. Spans are created only if an endpoint is
//! configured. They contain names of resources, never the content of a resource.

use kube::{Resource, ResourceExt as _};
use opentelemetry::trace::{SpanKind, Status, TraceContextExt as _, Tracer as _};
use opentelemetry::{Context, KeyValue};
use opentelemetry_sdk::trace::{SdkTracer, Span};
use process::trace::Tracer;

/// The span of a reconcile; `None` if spans are not exported.
#[derive(Debug)]
pub(crate) struct ReconcileSpan(Option<(SdkTracer, Context)>);

/// The span of a step, which ends when the value is dropped.
#[derive(Debug)]
pub(crate) struct StepSpan(#[expect(dead_code, reason = "the span ends when it is dropped")] Option<Span>);

impl ReconcileSpan {
    /// Starts the span of a reconcile of `object`.
    pub(crate) fn start(tracer: Option<&Tracer>, object: &impl Resource) -> Self {
        Self(tracer.map(|tracer| {
            let tracer = tracer.sdk();
            let builder = tracer.span_builder("reconcile").with_kind(SpanKind::Internal).with_attributes([
                KeyValue::new("k8s.namespace.name", object.namespace().unwrap_or_default()),
                KeyValue::new("ovfleet.llmdeployment.name", object.name_any()),
                KeyValue::new("ovfleet.llmdeployment.generation", object.meta().generation.unwrap_or(0)),
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
