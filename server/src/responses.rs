//! Responses that are being generated: [`assembly`] turns deltas into items and events, and [`live`] manages background
//! responses. Neither depends on HTTP. The store contains complete responses.

mod assembly;
mod live;
mod retained;

pub(crate) use assembly::{Assembly, LogprobFormat, NewResponse, encode};
pub(crate) use live::{BackgroundResponse, BackgroundResponses, FollowedEvents, Interruption, LiveResponse};
pub(crate) use retained::{RetainedRequest, json_bytes};
