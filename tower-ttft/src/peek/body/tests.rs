use super::*;
use crate::peek::{Budget, PeekParams, testing::Scripted};
use http::{HeaderMap, HeaderValue, Request};
use http_body_util::BodyExt;
use proptest::prelude::*;
use std::{future::poll_fn, pin::pin, task::Waker};

fn trailers() -> HeaderMap {
    HeaderMap::from_iter([(http::header::ETAG, HeaderValue::from_static("t"))])
}

/// Polls a body that is never pending to its end or first error.
fn drain<B>(body: &mut ReplayBody<B>) -> (Vec<u8>, Option<HeaderMap>, Option<PeekError>)
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<Error>,
{
    let mut cx = Context::from_waker(Waker::noop());
    let (mut bytes, mut trailers) = (Vec::new(), None);
    loop {
        let hint = body.size_hint();
        if hint.exact() == Some(0) && trailers.is_some() {
            assert!(body.is_end_stream());
        }
        match Pin::new(&mut *body).poll_frame(&mut cx) {
            Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                Ok(data) => {
                    assert!(trailers.is_none(), "data behind trailers");
                    assert!(!data.is_empty(), "an empty frame would end a chunked body");
                    if let Some(exact) = hint.exact() {
                        assert!(data.len() as u64 <= exact);
                    }
                    bytes.extend_from_slice(&data);
                }
                Err(frame) => trailers = frame.into_trailers().ok(),
            },
            Poll::Ready(Some(Err(error))) => return (bytes, trailers, Some(error)),
            Poll::Ready(None) => {
                assert!(body.is_end_stream());
                assert_eq!(body.size_hint().exact(), Some(0));
                return (bytes, trailers, None);
            }
            Poll::Pending => panic!("pending"),
        }
    }
}

fn params(peek_cap: usize) -> PeekParams {
    PeekParams {
        peek_cap,
        hard_cap: 1000,
        budget: Budget::new(1 << 20),
        ..PeekParams::default()
    }
}

#[test]
fn whole_bodies_say_their_length() {
    let mut body = ReplayBody::<Scripted>::whole(Bytes::from_static(b"abc"), None);
    assert_eq!(body.size_hint().exact(), Some(3));
    assert!(!body.is_end_stream());
    assert_eq!(body.bytes().map(|b| &b[..]), Some(&b"abc"[..]));
    let mut cx = Context::from_waker(Waker::noop());
    assert!(matches!(
        Pin::new(&mut body).poll_frame(&mut cx),
        Poll::Ready(Some(Ok(_)))
    ));
    assert_eq!(body.size_hint().exact(), Some(0));
    assert!(body.is_end_stream(), "hyper asks before it polls again");
    let empty = ReplayBody::<Scripted>::empty();
    assert!(empty.is_end_stream());
    assert_eq!(empty.size_hint().exact(), Some(0));
    assert!(empty.try_clone().is_some_and(|clone| clone.is_end_stream()));
}

#[test]
fn released_bodies_are_sent_and_not_replayed() {
    let budget = Budget::new(100);
    let whole = || budget.try_share(3).expect("free").pay_for(b"abc".to_vec());
    let mut body = ReplayBody::<Scripted>::whole(whole(), Some(trailers()));
    let mut clone = body.try_clone().expect("whole");
    body.release();
    assert!(body.try_clone().is_none() && !body.is_replayable() && body.bytes().is_none());
    assert_eq!(drain(&mut body).0, b"abc");
    assert_eq!(budget.free(), 97, "the clone still needs it");
    clone.release();
    assert_eq!(drain(&mut clone).1, Some(trailers()));
    assert_eq!(
        budget.free(),
        100,
        "freed with the last byte sent, not with the last handle"
    );
}

#[test]
fn another_body_in_its_place() {
    let body = ReplayBody::<Scripted>::whole(Bytes::from_static(b"abc"), Some(trailers()));
    let mut body = body.with_bytes(Bytes::from_static(b"abcd"));
    assert_eq!(body.size_hint().exact(), Some(4));
    let mut clone = body.try_clone().expect("whole");
    for body in [&mut body, &mut clone] {
        assert_eq!(drain(body).0, b"abcd");
    }
}

#[test]
fn debug_tells_nothing_of_the_body() {
    let body = ReplayBody::<Scripted>::whole(Bytes::from_static(b"a prompt"), None);
    assert!(!format!("{body:?}").contains("prompt"));
}

proptest! {
    /// Every split, with or without a length, a trailer, an error at any frame, under caps on either side of the length:
    /// what comes out is what went in, from the first byte on, in every clone taken at any time.
    #[test]
    fn replays_are_exact(
        parts in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..20), 0..8),
        with_trailers in any::<bool>(),
        exact in any::<bool>(),
        fail_at in prop::option::of(0usize..9),
        cap in 1usize..120,
        polls_before_clone in 0usize..4,
    ) {
        let whole: Vec<u8> = parts.concat();
        let mut script = Scripted::new(parts.iter().map(|p| Bytes::copy_from_slice(p)));
        if with_trailers {
            script.push_trailers(trailers());
        }
        let fails = fail_at.filter(|at| *at < script.len());
        if let Some(at) = fails {
            script.fail_at(at);
        }
        let sent_before_failure: Vec<u8> = match fails {
            Some(at) => parts.iter().take(at).flatten().copied().collect(),
            None => whole.clone(),
        };
        if exact {
            script.say_length(whole.len() as u64);
        }
        let params = params(cap);
        let req = Request::builder().uri("/v1/completions").body(script).expect("a request");
        let mut peeked = pin!(params.peek(req));
        let polled = peeked.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        let Poll::Ready(peeked) = polled else {
            panic!("nothing is waited for");
        };
        // Said to be over the cap, nothing is read; else everything up to the frame that crosses it.
        let crosses = sent_before_failure.len() > cap || (exact && whole.len() > cap);
        let mut body = match peeked {
            Ok(req) => req.into_body(),
            Err(error) => {
                prop_assert!(fails.is_some() && !crosses, "{error}");
                prop_assert!(matches!(error, PeekError::Body(_)));
                prop_assert_eq!(params.budget.free(), params.budget.total());
                return Ok(());
            }
        };
        let replayable = body.is_replayable();
        prop_assert!(replayable || crosses);
        for _ in 0..polls_before_clone {
            if body.is_end_stream() {
                break;
            }
            if let Poll::Ready(Some(Err(_)) | None) = Pin::new(&mut body).poll_frame(&mut Context::from_waker(Waker::noop())) {
                break;
            }
        }
        let clone = body.try_clone();
        prop_assert_eq!(clone.is_some(), replayable);
        drop(body);
        if let Some(mut clone) = clone {
            prop_assert_eq!(clone.size_hint().exact(), Some(whole.len() as u64));
            let mut second = clone.try_clone().expect("a clone can be cloned");
            for body in [&mut clone, &mut second] {
                let (bytes, got, error) = drain(body);
                prop_assert_eq!(&bytes, &whole);
                prop_assert_eq!(got, with_trailers.then(trailers));
                prop_assert!(error.is_none());
            }
        }
        prop_assert_eq!(params.budget.free(), params.budget.total());
    }

    /// A body that is streamed on: what was read while peeking, then the live rest, then its end or its error.
    #[test]
    fn streams_are_exact(
        parts in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..20), 2..8),
        with_trailers in any::<bool>(),
        exact in any::<bool>(),
        fails in any::<bool>(),
    ) {
        let whole: Vec<u8> = parts.concat();
        let mut script = Scripted::new(parts.iter().map(|p| Bytes::copy_from_slice(p)));
        if with_trailers {
            script.push_trailers(trailers());
        }
        if fails {
            script.fail_at(script.len());
        }
        if exact {
            script.say_length(whole.len() as u64);
        }
        let params = params(parts[0].len());
        let req = Request::builder().uri("/v1/completions").body(script).expect("a request");
        let mut peeked = pin!(params.peek(req));
        let polled = peeked.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        let Poll::Ready(Ok(req)) = polled else {
            panic!("nothing is waited for and nothing is wrong yet");
        };
        let mut body = req.into_body();
        prop_assert_eq!(body.size_hint().exact(), exact.then_some(whole.len() as u64));
        prop_assert!(body.try_clone().is_none());
        let mut error = None;
        let mut bytes = Vec::new();
        let mut got = None;
        let mut cx = Context::from_waker(Waker::noop());
        while let Poll::Ready(Some(frame)) = Pin::new(&mut body).poll_frame(&mut cx) {
            match frame.map(Frame::into_data) {
                Ok(Ok(data)) => bytes.extend_from_slice(&data),
                Ok(Err(frame)) => got = frame.into_trailers().ok(),
                Err(e) => error = Some(e),
            }
        }
        prop_assert_eq!(bytes, whole);
        prop_assert_eq!(got, with_trailers.then(trailers));
        prop_assert_eq!(error.is_some(), fails);
        prop_assert!(body.is_end_stream());
        drop(body);
        prop_assert_eq!(params.budget.free(), params.budget.total());
    }
}

#[tokio::test(start_paused = true)]
async fn the_live_rest_is_held_to_cap_and_pace() {
    // Over the hard cap only once it flows.
    let script = Scripted::new([vec![b'x'; 600].into(), vec![b'y'; 600].into()]);
    let req = Request::builder().uri("/").body(script).expect("a request");
    let req = params(100).peek(req).await.expect("not over the cap yet");
    let error = req.into_body().collect().await.expect_err("1200 > 1000");
    assert!(
        matches!(error, PeekError::TooLarge { cap: 1000 }),
        "{error}"
    );

    // Stalls only once it flows.
    let mut script = Scripted::new([vec![b'x'; 600].into()]);
    script.stall();
    let req = Request::builder().uri("/").body(script).expect("a request");
    let req = params(100).peek(req).await.expect("nothing is wrong yet");
    let start = tokio::time::Instant::now();
    let mut body = pin!(req.into_body());
    let first = poll_fn(|cx| body.as_mut().poll_frame(cx)).await;
    assert!(matches!(first, Some(Ok(_))));
    let error = body.collect().await.expect_err("it stalls");
    assert!(matches!(error, PeekError::Stalled { .. }), "{error}");
    assert_eq!(tokio::time::Instant::now() - start, Duration::from_secs(30));
}
