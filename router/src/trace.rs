//! Traces requests with OpenTelemetry. A trace that a client has started continues, and a fraction of the other
//! requests starts a new one. Without an endpoint for spans, the router traces no requests and forwards trace headers
//! unchanged.

use http::{HeaderMap, HeaderValue};
use opentelemetry::trace::{
    Span as _, SpanContext, SpanId, SpanKind, TraceContextExt as _, TraceFlags, TraceId, TraceState,
    Tracer as _,
};
use opentelemetry::{Context, KeyValue};
use process::trace::Tracer;

/// The span of a request.
#[derive(Debug)]
pub(crate) struct Span(opentelemetry_sdk::trace::Span);

impl Span {
    /// Starts the span of a request.
    pub(crate) fn start(tracer: &Tracer, name: &'static str, headers: &HeaderMap) -> Self {
        let parent = headers.get("traceparent").and_then(|value| value.to_str().ok()).and_then(parse);
        let context = Context::new();
        let context = match parent {
            Some(parent) => context.with_remote_span_context(parent),
            None => context,
        };
        let builder = tracer.sdk().span_builder(name).with_kind(SpanKind::Server);
        Self(tracer.sdk().build_with_context(builder, &context))
    }

    /// The trace header for the replica.
    pub(crate) fn header(&self) -> HeaderValue {
        let context = self.0.span_context();
        let flags = context.trace_flags() & TraceFlags::SAMPLED;
        let text = format!("00-{}-{}-{:02x}", context.trace_id(), context.span_id(), flags.to_u8());
        HeaderValue::from_str(&text).expect("invariant: digits and dashes are a header value")
    }

    /// Ends the span with attributes about the request.
    pub(crate) fn end(mut self, attributes: &[(&'static str, &str)]) {
        for &(name, value) in attributes {
            self.0.set_attribute(KeyValue::new(name, value.to_owned()));
        }
        self.0.end();
    }
}

/// Parses the `traceparent` header of W3C Trace Context, version 00 or the compatible part of a later version.
fn parse(header: &str) -> Option<SpanContext> {
    let mut parts = header.trim().split('-');
    let (version, trace, span, flags) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
    let is_hex = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte));
    let lengths = [(version, 2), (trace, 32), (span, 16), (flags, 2)];
    if version == "ff"
        || lengths.iter().any(|&(part, length)| part.len() != length || !is_hex(part))
        || (version == "00" && parts.next().is_some())
    {
        return None;
    }
    let flags = TraceFlags::new(u8::from_str_radix(flags, 16).ok()?) & TraceFlags::SAMPLED;
    let (trace, span) = (TraceId::from_hex(trace).ok()?, SpanId::from_hex(span).ok()?);
    let context = SpanContext::new(trace, span, flags, true, TraceState::default());
    context.is_valid().then_some(context)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_only_valid_w3c_trace_headers() {
        let good = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        let context = parse(good).unwrap();
        assert!(context.is_sampled() && context.is_remote());
        assert_eq!(context.span_id().to_string(), "00f067aa0ba902b7");
        assert!(parse("cc-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more").is_some());
        for bad in [
            "",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7",
            "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more",
            "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        ] {
            assert!(parse(bad).is_none(), "{bad}");
        }
    }
}
