//! The text formats of metrics: OpenMetrics, which the registry writes, and Prometheus's older text format, for
//! scrapers that request `text/plain`.

use std::collections::HashMap;

use axum::http::{HeaderMap, header};

/// A text format of metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exposition {
    OpenMetrics,
    /// Prometheus's text format 0.0.4.
    Prometheus,
}

impl Exposition {
    /// Returns the format that the `Accept` header prefers, or OpenMetrics if the header has no preference.
    pub(crate) fn preferred(headers: &HeaderMap) -> Self {
        let accepted = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
        let ranges: Vec<&str> = accepted.flat_map(|value| value.split(',')).collect();
        let quality = |media_type: &str| {
            let of_type = ranges.iter().filter_map(|range| quality_of(range, media_type));
            of_type.fold(0.0, f32::max)
        };
        if quality("text/plain") > quality("application/openmetrics-text") {
            Self::Prometheus
        } else {
            Self::OpenMetrics
        }
    }

    pub(crate) fn content_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
        }
    }

    /// Converts metrics from the OpenMetrics format to this format.
    pub(crate) fn convert_openmetrics(self, text: String) -> String {
        match self {
            Self::OpenMetrics => text,
            Self::Prometheus => prometheus(&text),
        }
    }
}

/// Returns the quality value of a media range of the `Accept` header, if the range names this type.
fn quality_of(range: &str, media_type: &str) -> Option<f32> {
    let mut parts = range.split(';').map(str::trim);
    if !parts.next()?.eq_ignore_ascii_case(media_type) {
        return None;
    }
    let quality = parts.find_map(|parameter| parameter.strip_prefix("q=")?.parse().ok());
    Some(quality.unwrap_or(1.0))
}

fn prometheus(openmetrics: &str) -> String {
    let kinds: HashMap<&str, &str> = openmetrics
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' ')))
        .collect();
    // In Prometheus's format, the family of a counter or an info metric has the name of its samples, including the
    // suffix.
    let family = |name: &str| match kinds.get(name).copied() {
        Some("counter") => format!("{name}_total"),
        Some("info") => format!("{name}_info"),
        _ => name.to_owned(),
    };
    let mut text = String::with_capacity(openmetrics.len());
    for line in openmetrics.lines() {
        if line == "# EOF" || line.starts_with("# UNIT ") {
            continue;
        }
        let described = line.strip_prefix("# HELP ").and_then(|rest| rest.split_once(' '));
        let typed = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' '));
        let line = match (described, typed) {
            (Some((name, help)), _) => format!("# HELP {} {help}", family(name)),
            (_, Some((name, kind))) => {
                let kind = match kind {
                    "info" => "gauge",
                    "unknown" => "untyped",
                    kind => kind,
                };
                format!("# TYPE {} {kind}", family(name))
            }
            (None, None) => line.to_owned(),
        };
        text.push_str(&line);
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    #[test]
    fn the_format_with_the_highest_quality_is_selected() {
        let preferred = |accept: Option<&'static str>| {
            let accept = accept.map(|accept| (header::ACCEPT, HeaderValue::from_static(accept)));
            Exposition::preferred(&accept.into_iter().collect())
        };
        for accept in [
            None,
            Some("*/*"),
            Some("application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.1"),
            Some("application/json"),
        ] {
            assert_eq!(preferred(accept), Exposition::OpenMetrics, "{accept:?}");
        }
        for accept in
            ["text/plain", "Text/Plain; q=0.5, application/openmetrics-text;q=0.4", "a/b, text/plain;q=0.1"]
        {
            assert_eq!(preferred(Some(accept)), Exposition::Prometheus, "{accept}");
        }
    }

    #[test]
    fn families_have_the_names_of_their_samples_in_prometheus_format() {
        let openmetrics = "# HELP a_requests Requests.\n# TYPE a_requests counter\na_requests_total{x=\"y\"} 3\n\
            # HELP a_build What runs.\n# TYPE a_build info\na_build_info{v=\"1\"} 1\n\
            # HELP a_seconds Time.\n# TYPE a_seconds histogram\n# UNIT a_seconds seconds\n\
            a_seconds_bucket{le=\"+Inf\"} 1\n# EOF\n";
        let expected = "# HELP a_requests_total Requests.\n# TYPE a_requests_total counter\n\
            a_requests_total{x=\"y\"} 3\n# HELP a_build_info What runs.\n# TYPE a_build_info gauge\n\
            a_build_info{v=\"1\"} 1\n# HELP a_seconds Time.\n# TYPE a_seconds histogram\n\
            a_seconds_bucket{le=\"+Inf\"} 1\n";
        assert_eq!(Exposition::Prometheus.convert_openmetrics(openmetrics.to_owned()), expected);
        assert_eq!(Exposition::OpenMetrics.convert_openmetrics(openmetrics.to_owned()), openmetrics);
    }
}
