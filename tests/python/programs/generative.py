"""Networks that generate images, and samples from a latent space."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import layers, ops
from programs.program import GLOBAL, Program, compiled
from programs.rows import CLASSES, IMAGES, MASKS, NUMBERS


def step(model: Any, tape: Any, loss: Any, part: Any, optimizer: Any = None) -> None:
    """Apply the gradients of a loss to a part of a model."""
    weights = part.trainable_variables
    found = zip(tape.gradient(loss, weights), weights, strict=True)
    (optimizer or model.optimizer).apply_gradients(found)


class Vae(keras.Model):
    """A variational autoencoder with its own trackers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = keras.Sequential([keras.Input((10,)), layers.Dense(4)])
        self.decoder = keras.Sequential([keras.Input((2,)), layers.Dense(10)])
        self.noise = keras.random.SeedGenerator(3)
        self.total_loss_tracker = keras.metrics.Mean(name="total_loss")
        self.kl_loss_tracker = keras.metrics.Mean(name="kl_loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.total_loss_tracker, self.kl_loss_tracker]

    def train_step(self, data: Any) -> Any:
        x = data
        with tf.GradientTape() as tape:
            mean, spread = ops.split(self.encoder(x), 2, axis=-1)
            drawn = keras.random.normal(ops.shape(mean), seed=self.noise)
            made = self.decoder(mean + ops.exp(0.5 * spread) * drawn)
            kl = ops.mean(ops.sum(ops.exp(spread) + ops.square(mean) - 1 - spread, -1))
            loss = ops.mean(ops.sum(ops.square(made - x), -1)) + kl
        step(self, tape, loss, self)
        self.total_loss_tracker.update_state(loss)
        self.kl_loss_tracker.update_state(kl)
        return {"loss": self.total_loss_tracker.result(), "kl_loss": self.kl_loss_tracker.result()}


def vae() -> Any:
    model = Vae()
    model.compile("adam")
    return model


class Codebook(layers.Layer):
    """Replaces each vector with the nearest of some learned vectors."""

    def build(self, shape: Any) -> None:
        self.codes = self.add_weight(shape=(shape[-1], 6), initializer="random_uniform")

    def call(self, x: Any) -> Any:
        flat = ops.reshape(x, (-1, x.shape[-1]))
        gaps = ops.sum(self.codes**2, 0) - 2 * ops.matmul(flat, self.codes)
        nearest = ops.one_hot(ops.argmin(gaps, 1), 6)
        found = ops.reshape(ops.matmul(nearest, ops.transpose(self.codes)), ops.shape(x))
        self.add_loss(0.25 * ops.mean((ops.stop_gradient(found) - x) ** 2))
        self.add_loss(ops.mean((found - ops.stop_gradient(x)) ** 2))
        return x + ops.stop_gradient(found - x)


class VqTrainer(keras.Model):
    """Trains a quantized autoencoder: the losses of its codebook are added to its own."""

    def __init__(self, variance: float) -> None:
        super().__init__()
        self.variance = variance
        image = keras.Input((8, 8, 1))
        x = layers.Conv2D(4, 3, 2, padding="same", activation="relu")(image)
        x = Codebook()(layers.Conv2D(3, 1)(x))
        self.vqvae = keras.Model(image, layers.Conv2DTranspose(1, 3, 2, padding="same")(x))
        self.trackers = [keras.metrics.Mean(name) for name in ("loss", "vq_loss")]

    @property
    def metrics(self) -> list[Any]:
        return self.trackers

    def train_step(self, data: Any) -> Any:
        x = data
        with tf.GradientTape() as tape:
            made = self.vqvae(x)
            loss = ops.mean((x - made) ** 2) / self.variance + sum(self.vqvae.losses)
        step(self, tape, loss, self.vqvae)
        self.trackers[0].update_state(loss)
        self.trackers[1].update_state(sum(self.vqvae.losses))
        return {m.name: m.result() for m in self.metrics}


def vq_vae() -> Any:
    model = VqTrainer(0.25)
    model.compile(optimizer=keras.optimizers.Adam(0.01))
    return model


def critic(channels: int = 3) -> Any:
    return keras.Sequential(
        [
            keras.Input((8, 8, channels)),
            layers.Conv2D(4, 4, 2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Flatten(),
            layers.Dense(1),
        ]
    )


def maker(inputs: int = 5) -> Any:
    return keras.Sequential(
        [
            keras.Input((inputs,)),
            layers.Dense(32),
            layers.Reshape((4, 4, 2)),
            layers.Conv2DTranspose(3, 4, 2, padding="same", activation="tanh"),
        ]
    )


class Gan(keras.Model):
    """Two networks with two optimizers, and labels with noise."""

    def __init__(self) -> None:
        super().__init__()
        self.discriminator, self.generator = critic(), maker()
        self.seed_generator = keras.random.SeedGenerator(1337)

    def compile(self, d_optimizer: Any, g_optimizer: Any, loss_fn: Any) -> None:
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn
        self.d_metric = keras.metrics.Mean(name="d_loss")
        self.g_metric = keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.d_metric, self.g_metric]

    def train_step(self, data: Any) -> Any:
        real = data
        count = ops.shape(real)[0]
        noise = keras.random.normal((count, 5), seed=self.seed_generator)
        both = ops.concatenate([self.generator(noise), real], 0)
        labels = ops.concatenate([ops.ones((count, 1)), ops.zeros((count, 1))], 0)
        labels += 0.05 * tf.random.uniform(tf.shape(labels))
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(both))
        step(self, tape, d_loss, self.discriminator, self.d_optimizer)
        noise = keras.random.normal((count, 5), seed=self.seed_generator)
        with tf.GradientTape() as tape:
            found = self.discriminator(self.generator(noise))
            g_loss = self.loss_fn(ops.zeros((count, 1)), found)
        step(self, tape, g_loss, self.generator, self.g_optimizer)
        self.d_metric.update_state(d_loss)
        self.g_metric.update_state(g_loss)
        return {"d_loss": self.d_metric.result(), "g_loss": self.g_metric.result()}


def gan() -> Any:
    model = Gan()
    rate = keras.optimizers.Adam(0.001), keras.optimizers.Adam(0.001)
    model.compile(*rate, keras.losses.BinaryCrossentropy(from_logits=True))
    return model


class ConditionalGan(Gan):
    """Both networks get the class, as planes of an image and as a part of the noise."""

    def __init__(self) -> None:
        super().__init__()
        self.discriminator, self.generator = critic(7), maker(9)

    def train_step(self, data: Any) -> Any:
        real, classes = data
        known = ops.one_hot(classes, 4)
        count = ops.shape(real)[0]
        planes = ops.broadcast_to(known[:, None, None], (count, 8, 8, 4))
        noise = keras.random.normal((count, 5), seed=self.seed_generator)
        noise = ops.concatenate([noise, known], 1)
        made = ops.concatenate([self.generator(noise), planes], -1)
        both = ops.concatenate([made, ops.concatenate([real, planes], -1)], 0)
        labels = ops.concatenate([ops.ones((count, 1)), ops.zeros((count, 1))], 0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(both))
        step(self, tape, d_loss, self.discriminator, self.d_optimizer)
        with tf.GradientTape() as tape:
            made = ops.concatenate([self.generator(noise), planes], -1)
            g_loss = self.loss_fn(ops.zeros((count, 1)), self.discriminator(made))
        step(self, tape, g_loss, self.generator, self.g_optimizer)
        self.d_metric.update_state(d_loss)
        self.g_metric.update_state(g_loss)
        return {"d_loss": self.d_metric.result(), "g_loss": self.g_metric.result()}


def conditional_gan() -> Any:
    model = ConditionalGan()
    rate = keras.optimizers.Adam(0.001), keras.optimizers.Adam(0.001)
    model.compile(*rate, keras.losses.BinaryCrossentropy(from_logits=True))
    return model


class Wgan(keras.Model):
    """A critic that takes several steps, with a penalty on its gradients."""

    def __init__(self, discriminator: Any, generator: Any, steps: int = 2) -> None:
        super().__init__()
        self.discriminator, self.generator, self.d_steps = discriminator, generator, steps

    def compile(self, d_optimizer: Any, g_optimizer: Any, d_loss_fn: Any, g_loss_fn: Any) -> None:
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer
        self.d_loss_fn, self.g_loss_fn = d_loss_fn, g_loss_fn

    def gradient_penalty(self, count: Any, real: Any, made: Any) -> Any:
        between = real + tf.random.uniform([count, 1, 1, 1], 0.0, 1.0) * (made - real)
        with tf.GradientTape() as tape:
            tape.watch(between)
            found = self.discriminator(between, training=True)
        slopes = tape.gradient(found, [between])[0]
        norm = ops.sqrt(ops.sum(ops.square(slopes), axis=(1, 2, 3)))
        return ops.mean((norm - 1.0) ** 2)

    def train_step(self, data: Any) -> Any:
        real = data
        count = tf.shape(real)[0]
        for _ in range(self.d_steps):
            noise = tf.random.normal((count, 5))
            with tf.GradientTape() as tape:
                made = self.generator(noise, training=True)
                found = self.discriminator(made), self.discriminator(real)
                d_loss = self.d_loss_fn(*found) + 10 * self.gradient_penalty(count, real, made)
            step(self, tape, d_loss, self.discriminator, self.d_optimizer)
        with tf.GradientTape() as tape:
            made = self.generator(tf.random.normal((count, 5)), training=True)
            g_loss = self.g_loss_fn(self.discriminator(made))
        step(self, tape, g_loss, self.generator, self.g_optimizer)
        return {"d_loss": d_loss, "g_loss": g_loss}


def wgan() -> Any:
    model = Wgan(critic(), maker())
    rate = [keras.optimizers.Adam(0.0002, beta_1=0.5, beta_2=0.9) for _ in range(2)]
    model.compile(*rate, lambda made, real: ops.mean(made) - ops.mean(real), lambda x: -ops.mean(x))
    return model


class CycleGan(keras.Model):
    """Two generators and two discriminators, with four optimizers and a persistent tape."""

    def __init__(self) -> None:
        super().__init__()
        self.gen = [keras.Sequential([keras.Input((8, 8, 3)), self.layer()]) for _ in range(2)]
        self.disc = [critic() for _ in range(2)]

    def layer(self) -> Any:
        return layers.Conv2D(3, 3, padding="same", activation="tanh")

    def compile(self, optimizers: Any, gen_loss_fn: Any, disc_loss_fn: Any) -> None:
        super().compile()
        self.optimizers = optimizers
        self.gen_loss_fn, self.disc_loss_fn = gen_loss_fn, disc_loss_fn
        self.cycle_loss_fn = keras.losses.MeanAbsoluteError()
        self.identity_loss_fn = keras.losses.MeanAbsoluteError()

    def train_step(self, data: Any) -> Any:
        real = data
        with tf.GradientTape(persistent=True) as tape:
            fake = [self.gen[n](real[1 - n], training=True) for n in (0, 1)]
            losses = []
            for n in (0, 1):
                cycled = self.gen[n](fake[1 - n], training=True)
                same = self.gen[n](real[n], training=True)
                g_loss = self.gen_loss_fn(self.disc[n](fake[n]))
                g_loss += 10 * self.cycle_loss_fn(real[n], cycled)
                g_loss += 5 * self.identity_loss_fn(real[n], same)
                d_loss = self.disc_loss_fn(self.disc[n](real[n]), self.disc[n](fake[n]))
                losses += [g_loss, d_loss]
        for n in (0, 1):
            step(self, tape, losses[2 * n], self.gen[n], self.optimizers[2 * n])
            step(self, tape, losses[2 * n + 1], self.disc[n], self.optimizers[2 * n + 1])
        return {"G_loss": losses[0], "F_loss": losses[2], "D_loss": losses[1] + losses[3]}


def real_or_not(real: Any, fake: Any) -> Any:
    return 0.5 * (ops.mean((real - 1) ** 2) + ops.mean(fake**2))


def cyclegan() -> Any:
    model = CycleGan()
    rate = [keras.optimizers.Adam(2e-4, beta_1=0.5) for _ in range(4)]
    model.compile(rate, lambda fake: ops.mean((fake - 1) ** 2), real_or_not)
    return model


class AdaptiveGan(Gan):
    """Augments more if the discriminator is too sure: the probability follows its accuracy."""

    def __init__(self) -> None:
        super().__init__()
        self.probability = tf.Variable(0.1)

    def augment(self, images: Any) -> Any:
        drawn = keras.random.uniform((ops.shape(images)[0], 1, 1, 1), seed=self.seed_generator)
        return ops.where(drawn < self.probability, images[:, :, ::-1], images)

    def train_step(self, data: Any) -> Any:
        real = self.augment(data)
        noise = keras.random.normal((ops.shape(real)[0], 5), seed=self.seed_generator)
        with tf.GradientTape(persistent=True) as tape:
            made = self.augment(self.generator(noise))
            found = self.discriminator(real), self.discriminator(made)
            d_loss = self.loss_fn(ops.ones_like(found[0]), found[0])
            d_loss += self.loss_fn(ops.zeros_like(found[1]), found[1])
            g_loss = self.loss_fn(ops.ones_like(found[1]), found[1])
        step(self, tape, d_loss, self.discriminator, self.d_optimizer)
        step(self, tape, g_loss, self.generator, self.g_optimizer)
        sure = self.measure(found[0])
        self.probability.assign(tf.clip_by_value(self.probability + (sure - 0.6) / 50, 0.0, 1.0))
        self.d_metric.update_state(d_loss)
        self.g_metric.update_state(g_loss)
        return {"d_loss": self.d_metric.result(), "g_loss": self.g_metric.result()}

    def measure(self, logits: Any) -> Any:
        return tf.reduce_mean(tf.cast(logits > 0, "float32"))


class AdaptiveGanOfAllRows(AdaptiveGan):
    """Uses the accuracy on the rows of all workers, through `compute_loss`."""

    def measure(self, logits: Any) -> Any:
        return self.compute_loss(y_pred=logits)

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None
    ) -> Any:
        return super().measure(y_pred)


def adaptive_gan(kind: Any) -> Any:
    model = kind()
    rate = keras.optimizers.Adam(0.001), keras.optimizers.Adam(0.001)
    model.compile(*rate, keras.losses.BinaryCrossentropy(from_logits=True))
    return model


def denoiser() -> Any:
    image, spread = keras.Input((8, 8, 3)), keras.Input((1, 1, 1))
    angles = spread * 2.0 * 3.14159 * ops.exp(ops.linspace(0.0, 2.0, 2))
    waves = ops.concatenate([ops.sin(angles), ops.cos(angles)], -1)
    x = layers.Concatenate()([image, layers.UpSampling2D(8)(waves)])
    x = layers.Conv2D(6, 3, padding="same", activation="swish")(x)
    return keras.Model([image, spread], layers.Conv2D(3, 1, kernel_initializer="zeros")(x))


class Ddim(keras.Model):
    """Predicts noise at random times; a second network is the moving average of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.normalizer = layers.Normalization()
        self.network = denoiser()
        self.ema_network = keras.models.clone_model(self.network)
        self.ema_network.set_weights(self.network.get_weights())

    def compile(self, **options: Any) -> None:
        super().compile(**options)
        self.noise_loss_tracker = keras.metrics.Mean(name="n_loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.noise_loss_tracker]

    def train_step(self, data: Any) -> Any:
        images = self.normalizer(data, training=True)
        count = ops.shape(images)[0]
        noises = keras.random.normal((count, 8, 8, 3))
        times = keras.random.uniform((count, 1, 1, 1), 0.0, 1.0)
        signal, spread = ops.cos(times), ops.sin(times)
        with tf.GradientTape() as tape:
            found = self.network([signal * images + spread * noises, spread**2], training=True)
            loss = self.loss(noises, found)
        step(self, tape, loss, self.network)
        self.noise_loss_tracker.update_state(loss)
        for weight, mean in zip(self.network.weights, self.ema_network.weights, strict=True):
            mean.assign(0.9 * mean + 0.1 * weight)
        return {m.name: m.result() for m in self.metrics}


def ddim() -> Any:
    model = Ddim()
    model.normalizer.adapt(IMAGES)
    optimizer = keras.optimizers.AdamW(1e-3, weight_decay=1e-4)
    model.compile(optimizer=optimizer, loss=keras.losses.MeanAbsoluteError())
    return model


class Ddpm(keras.Model):
    """Adds noise in steps from a table, by integer times."""

    def __init__(self) -> None:
        super().__init__()
        self.network = denoiser()
        self.kept = ops.cumprod(1 - ops.linspace(1e-4, 0.02, 20))

    def train_step(self, data: Any) -> Any:
        images = data
        count = tf.shape(images)[0]
        times = tf.random.uniform((count,), 0, 20, dtype=tf.int64)
        with tf.GradientTape() as tape:
            noise = tf.random.normal(tf.shape(images))
            kept = tf.gather(self.kept, times)[:, None, None, None]
            noisy = tf.sqrt(kept) * images + tf.sqrt(1 - kept) * noise
            at = tf.cast(times, "float32")[:, None, None, None] / 20
            loss = self.loss(noise, self.network([noisy, at], training=True))
        step(self, tape, loss, self.network)
        return {"loss": loss}


def ddpm() -> Any:
    model = Ddpm()
    model.compile(keras.optimizers.Adam(2e-4), keras.losses.MeanSquaredError())
    return model


class RealNvp(keras.Model):
    """A chain of invertible layers, each of which changes one half of the numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.masks = [[0.0, 1.0] * 5, [1.0, 0.0] * 5]
        self.parts = [
            [
                keras.Sequential([keras.Input((10,)), layers.Dense(10, end)])
                for end in (None, "tanh")
            ]
            for _ in self.masks
        ]
        self.loss_tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.loss_tracker]

    def log_loss(self, x: Any) -> Any:
        total = 0.0
        for mask, (shift, scale) in zip(self.masks, self.parts, strict=True):
            kept = x * mask
            size = scale(kept) * (1 - ops.array(mask))
            x = kept + (1 - ops.array(mask)) * (x * ops.exp(size) + shift(kept))
            total = total + ops.sum(size, -1)
        return -ops.mean(-0.5 * ops.sum(x**2, -1) + total)

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = self.log_loss(data)
        step(self, tape, loss, self)
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}


def real_nvp() -> Any:
    model = RealNvp()
    model.compile(optimizer=keras.optimizers.Adam(0.001))
    return model


class Causal(layers.Layer):
    """A convolution over the pixels before its own."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.kind, self.conv = kind, layers.Conv2D(**options)

    def build(self, shape: Any) -> None:
        self.conv.build(shape)
        height, width, *_ = self.conv.kernel.shape
        mask = tf.sequence_mask(height // 2 * width + width // 2 + (self.kind == "B"), 9)
        self.mask = tf.reshape(tf.cast(mask, "float32"), (3, 3, 1, 1))

    def call(self, x: Any) -> Any:
        self.conv.kernel.assign(self.conv.kernel * self.mask)
        return self.conv(x)


def pixelcnn() -> Any:
    image = keras.Input((8, 8, 1))
    x = Causal("A", filters=4, kernel_size=3, padding="same", activation="relu")(image)
    x = x + Causal("B", filters=4, kernel_size=3, padding="same", activation="relu")(x)
    x = layers.Conv2D(1, 1, activation="sigmoid")(x)
    return compiled(keras.Model(image, x), "binary_crossentropy", keras.optimizers.Adam(0.0005))


class Style(keras.Model):
    """Transfers the means and spreads of another image (AdaIN); only the decoder learns."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = keras.Sequential([keras.Input((8, 8, 3)), layers.Conv2D(4, 3, 2)])
        self.encoder.trainable = False
        self.decoder = keras.Sequential(
            [keras.Input((3, 3, 4)), layers.Conv2DTranspose(3, 4, 2, activation="relu")]
        )
        self.trackers = [keras.metrics.Mean(name) for name in ("style_loss", "content_loss")]

    def compile(self, optimizer: Any, loss_fn: Any) -> None:
        super().compile()
        self.optimizer, self.loss_fn = optimizer, loss_fn

    @property
    def metrics(self) -> list[Any]:
        return self.trackers

    def train_step(self, data: Any) -> Any:
        style, content = data
        encoded = self.encoder(style), self.encoder(content)
        (mean, spread), (own, width) = (
            (ops.mean(x, (1, 2), keepdims=True), ops.std(x, (1, 2), keepdims=True) + 1e-5)
            for x in encoded
        )
        with tf.GradientTape() as tape:
            wanted = spread * (encoded[1] - own) / width + mean
            found = self.encoder(self.decoder(wanted))
            content_loss = self.loss_fn(wanted, found)
            moments = self.loss_fn(mean, ops.mean(found, (1, 2), keepdims=True))
            style_loss = 4 * (moments + self.loss_fn(spread, ops.std(found, (1, 2), keepdims=True)))
            loss = content_loss + style_loss
        step(self, tape, loss, self.decoder)
        self.trackers[0].update_state(style_loss)
        self.trackers[1].update_state(content_loss)
        return {m.name: m.result() for m in self.metrics}


def style_transfer() -> Any:
    model = Style()
    model.compile(keras.optimizers.Adam(1e-3), keras.losses.MeanSquaredError())
    return model


PROGRAMS = {
    "VAE": Program(vae, NUMBERS, is_random=True),
    "VQ-VAE": Program(vq_vae, MASKS),
    "DCGAN": Program(gan, IMAGES, is_random=True),
    "conditional GAN": Program(conditional_gan, (IMAGES, CLASSES), is_random=True),
    "WGAN-GP": Program(wgan, IMAGES, is_random=True),
    "CycleGAN": Program(cyclegan, (IMAGES, IMAGES[::-1].copy())),
    "adaptive GAN, accuracy of a batch": Program(
        lambda: adaptive_gan(AdaptiveGan), IMAGES, error="self.compute_loss()"
    ),
    "adaptive GAN": Program(
        lambda: adaptive_gan(AdaptiveGanOfAllRows),
        IMAGES,
        lines=5,
        is_random=True,
        settings=GLOBAL,
    ),
    "DDIM": Program(ddim, IMAGES, is_random=True),
    "DDPM": Program(ddpm, IMAGES, is_random=True),
    "RealNVP": Program(real_nvp, NUMBERS),
    "PixelCNN": Program(pixelcnn, (MASKS, MASKS)),
    "AdaIN": Program(style_transfer, (IMAGES, IMAGES[::-1].copy())),
}
