"""TFRecord files of tf.train.Example, written and read with numpy and Arrow, without TensorFlow."""
