//! Puts an encoder on the path of requests.
use super::Encode;
use crate::peek::InferenceRequest;
use futures::future::BoxFuture;
use http::Request;
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
            let prompt = encode.encode(&peeked).await;
            drop(peeked);
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
        peek::Api,
        prompt::{Encoder, EncoderParams, Prompt, Source, read::tests::request},
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
        assert!(svc.oneshot(Request::new(())).await.unwrap().is_none());
    }
}
