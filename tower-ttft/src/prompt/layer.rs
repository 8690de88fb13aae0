//! Puts an encoder on the path of requests.
use super::{Encode, Reason, Source};
use crate::peek::InferenceRequest;
use futures::future::BoxFuture;
use http::{Request, header};
use std::{
    fmt, mem,
    sync::Arc,
    task::{Context, Poll},
};
use tower_service::Service;

/// Reads the [`InferenceRequest`] extension of a request and adds a [`Prompt`](super::Prompt). A request without one
/// (nothing peeked at it) passes unchanged.
#[derive(Clone)]
pub struct EncodeLayer {
    encode: Arc<dyn Encode>,
}

/// The service of [`EncodeLayer`].
#[derive(Clone)]
pub struct EncodeService<S> {
    encode: Arc<dyn Encode>,
    inner: S,
}

// === impl EncodeLayer ===

impl EncodeLayer {
    /// A layer that asks this encoder.
    pub fn new(encode: Arc<dyn Encode>) -> Self {
        Self { encode }
    }
}

impl<S> tower_layer::Layer<S> for EncodeLayer {
    type Service = EncodeService<S>;

    fn layer(&self, inner: S) -> Self::Service {
        EncodeService {
            encode: self.encode.clone(),
            inner,
        }
    }
}

impl fmt::Debug for EncodeLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EncodeLayer").finish_non_exhaustive()
    }
}

// === impl EncodeService ===

impl<S, B> Service<Request<B>> for EncodeService<S>
where
    S: Service<Request<B>> + Clone + Send + 'static,
    S::Future: Send,
    S::Response: Send,
    S::Error: Send,
    B: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<S::Response, S::Error>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut req: Request<B>) -> Self::Future {
        let Some(peeked) = req.extensions().get::<InferenceRequest>().cloned() else {
            return Box::pin(self.inner.call(req));
        };
        let encode = self.encode.clone();
        // The service that was polled ready is the one to call; its clone takes the next request.
        let next = self.inner.clone();
        let mut inner = mem::replace(&mut self.inner, next);
        Box::pin(async move {
            let mut prompt = encode.encode(&peeked).await;
            drop(peeked);
            if prompt.source == Source::Approximate(Reason::Unread) {
                let length = req.headers().get(header::CONTENT_LENGTH);
                let length = length.and_then(|l| l.to_str().ok()?.parse().ok());
                prompt.weigh_unread(length.unwrap_or(0));
            }
            req.extensions_mut().insert(prompt);
            inner.call(req).await
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        chain::KeySpace,
        peek::{Api, BodyRead},
        prompt::{Encoder, EncoderParams, Prompt, read::tests::request},
    };
    use tower::{ServiceExt, service_fn};
    use tower_layer::Layer;

    #[tokio::test]
    async fn a_peeked_request_gets_a_prompt_and_others_none() {
        let encoder = Encoder::new(EncoderParams::new("m", KeySpace::new(1)));
        let svc =
            EncodeLayer::new(Arc::new(encoder)).layer(service_fn(|req: Request<()>| async move {
                Ok::<_, std::convert::Infallible>(req.extensions().get::<Prompt>().cloned())
            }));
        let mut req = Request::new(());
        req.extensions_mut()
            .insert(request(Api::Completions, r#"{"prompt":[1,2,3]}"#));
        let prompt = svc.clone().oneshot(req).await.unwrap().unwrap();
        assert_eq!((prompt.tokens, prompt.source), (3, Source::Ids));
        assert!(
            svc.clone()
                .oneshot(Request::new(()))
                .await
                .unwrap()
                .is_none()
        );

        // A body that nobody could read is as large as its length says.
        let mut req = Request::new(());
        req.headers_mut()
            .insert("content-length", "4000000".parse().unwrap());
        req.extensions_mut()
            .insert(InferenceRequest::unread(Api::Chat, BodyRead::TooLarge));
        let prompt = svc.oneshot(req).await.unwrap().unwrap();
        assert_eq!((prompt.tokens, prompt.bytes), (1_000_000, 4_000_000));
    }
}
